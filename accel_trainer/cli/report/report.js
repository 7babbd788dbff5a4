"use strict";
// Replaces the picture of each chart by one that can be hovered, zoomed and smoothed. The page also works without it.
(() => {
  const read = () => JSON.parse(document.getElementById("data").textContent);
  let { runs, charts, kinds, cutOff } = read();
  const cards = [...document.querySelectorAll("[data-chart]")];
  const tools = document.getElementById("tools");
  const reset = document.getElementById("reset");
  const tip = document.getElementById("tip");
  const svgNamespace = document.querySelector(".plot svg").namespaceURI; // not spelled out: the page has no address
  // A live page is loaded again when there is a new run: what was chosen stays until its tab is closed.
  const isLive = "version" in document.body.dataset;
  const chosen = JSON.parse((isLive && sessionStorage.getItem("chosen")) || "{}");
  const state = { axis: chosen.axis ?? "step", smoothing: chosen.smoothing ?? 0, zoom: null, hidden: new Set(chosen.hidden) };
  let unit, unitName, labels;

  /** Choose the unit of times: runs that go on become longer. */
  function chooseUnit() {
    const longest = Math.max(...runs.map((run) => (run.clock ? run.clock[1].at(-1) : 0)));
    [unit, unitName] = longest < 300 ? [1, "s"] : longest < 10800 ? [60, "min"] : [3600, "h"];
    labels = { step: "optimizer step", epoch: "epoch", time: `training time, ${unitName}` };
  }

  // --- data ---

  const kindOf = (name) => name.split("/")[0];
  const last = (points) => points[points.length - 1];
  const smallest = (items, size) => items.reduce((a, b) => (size(b) < size(a) ? b : a));

  /** Return the index of the first value that is at least `x`. */
  function search(values, x) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < x) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** Return the x of a step, or null if it is not known. */
  function position(run, step) {
    if (state.axis === "step") return step;
    if (state.axis === "epoch") return run.steps_per_epoch ? step / run.steps_per_epoch : null;
    if (!run.clock) return null;
    const [steps, seconds] = run.clock;
    const after = Math.min(Math.max(search(steps, step), 1), steps.length - 1);
    const slope = (seconds[after] - seconds[after - 1]) / (steps[after] - steps[after - 1]);
    return (seconds[after - 1] + (step - steps[after - 1]) * slope) / unit;
  }

  /** Return the exponential moving average, corrected for its start at zero. */
  function smooth(points, weight) {
    let sum = 0, norm = 0;
    return points.map(([x, y]) => {
      sum = weight * sum + (1 - weight) * y;
      norm = weight * norm + (1 - weight);
      return [x, sum / norm];
    });
  }

  const isSame = (a, b) => a.length === b.length && a.every(([x, y], place) => x === b[place][0] && y === b[place][1]);

  function linesOf(chart) {
    const lines = [];
    runs.forEach((run, index) => {
      for (const name of chart.names) {
        const kind = kindOf(name);
        if (!run.series[name] || state.hidden.has(`run ${run.name}`) || state.hidden.has(kind)) continue;
        const [row, values] = run.series[name];
        const raw = values
          .map((y, place) => [position(run, run.steps[row][place]), y])
          .filter(([x, y]) => x !== null && y !== null && (y > 0 || !chart.isLog));
        if (!raw.length) continue;
        // Evaluations are few and the learning rate is exact: neither is noisy.
        const isSmoothed = state.smoothing > 0 && !kind.startsWith("eval") && name !== "optim/learning_rate";
        const color = `var(--${runs.length > 1 ? run.color : kinds[kind]?.color ?? "series-1"})`;
        // A line with the points of earlier ones would hide them: it is dashed.
        const copies = lines.filter((line) => line.name === name && isSame(line.raw, raw)).length;
        lines.push({ run, index, name, kind, color, raw, copies, points: isSmoothed ? smooth(raw, state.smoothing) : raw });
      }
    });
    return lines;
  }

  // --- numbers ---

  function ticks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
    return found;
  }

  function logTicks(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const factor of high / low < 100 ? [1, 2, 5] : [1]) found.push(factor * 10 ** power);
    }
    return found.filter((value) => value >= low && value <= high);
  }

  function show(value, chart, digits = 4) {
    if (chart?.format === "percent") return `${Number((100 * value).toPrecision(digits))}%`;
    if (value && Math.abs(value) < 1e-3) return Number(value.toPrecision(3)).toExponential();
    return Number(value.toPrecision(Math.abs(value) < 1e4 ? digits : 6)).toLocaleString("en-US", { maximumFractionDigits: 6 });
  }

  // --- drawing ---

  function set(element, attributes) {
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  function make(name, attributes, parent, text = "") {
    const element = set(document.createElementNS(svgNamespace, name), attributes);
    element.textContent = text;
    parent?.append(element);
    return element;
  }

  function remember() {
    const logs = charts.filter((chart) => chart.isLog).map((chart) => chart.names[0]);
    const { axis, smoothing, hidden } = state;
    sessionStorage.setItem("chosen", JSON.stringify({ axis, smoothing, hidden: [...hidden], logs }));
  }

  function drawAll() {
    if (isLive) remember();
    const shown = charts.map(linesOf);
    const ends = shown.flat().map((line) => last(line.raw)[0]);
    const whole = [0, Math.max(...ends, 0) || 1];
    charts.forEach((chart, number) => draw(chart, cards[number], shown[number], state.zoom ?? whole));
    reset.hidden = !state.zoom;
  }

  /** Return what the y axis spans: the values between `left` and `right` with some room. */
  function rangeOf(chart, lines, left, right) {
    const seen = lines.flatMap(({ points, raw }) => [...points, ...raw]).filter(([x]) => x >= left && x <= right).map(([, y]) => y);
    if (!seen.length) return [chart.isLog ? 0.1 : 0, 1];
    const low = smallest(seen, (y) => y), high = smallest(seen, (y) => -y);
    if (chart.isLog) return high > low ? [low / 1.1, high * 1.1] : [low / 2, high * 2];
    const top = isCut(chart, high) && low < chart.top ? chart.top : high;
    const room = top > low ? 0.04 * (top - low) : Math.abs(top) / 10 || 1; // a constant gets room as well
    return [chart.fromZero ? 0 : low < 0 ? low - room : Math.max(low - room, 0), top + room];
  }

  const isCut = (chart, high) => chart.top !== null && high > chart.top && !chart.isLog;

  function draw(chart, card, lines, [left, right]) {
    const box = card.querySelector(".plot");
    const width = Math.max(box.clientWidth, 240), height = Math.round(Math.min(Math.max(width * 0.52, 190), 300));
    const [low, high] = rangeOf(chart, lines, left, right);
    const scale = chart.isLog ? Math.log : (y) => y;
    const marks = (chart.isLog ? logTicks(low, high) : ticks(low, high, 6)).map((y) => [y, show(y, chart)]);
    const margin = 12 + 6.2 * Math.max(3, ...marks.map(([, text]) => text.length)), inside = width - margin - 6, floor = height - 38;
    const xAt = (x) => margin + ((x - left) / (right - left)) * inside;
    const yAt = (y) => 6 + (1 - (scale(y) - scale(low)) / (scale(high) - scale(low))) * (floor - 6);

    const toX = (pixel) => left + Math.min(Math.max((pixel - margin) / inside, 0), 1) * (right - left);

    const label = `${card.querySelector("h3").firstChild.textContent}: the arrow keys read values`;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, class: "live", role: "img", tabindex: 0, "aria-label": label });
    for (const [y, text] of marks) {
      make("line", { x1: margin, x2: width - 6, y1: yAt(y), y2: yAt(y), class: "rule" }, svg);
      make("text", { x: margin - 8, y: yAt(y) + 4, "text-anchor": "end" }, svg, text);
    }
    for (const x of ticks(left, right, Math.min(7, inside / 60))) make("text", { x: xAt(x), y: floor + 17, "text-anchor": "middle" }, svg, show(x));
    make("text", { x: width - 6, y: height - 4, "text-anchor": "end" }, svg, labels[state.axis]);
    if (lines.some(({ points }) => points.some(([x, y]) => x >= left && x <= right && y > high))) {
      make("text", { x: width - 8, y: 16, "text-anchor": "end" }, svg, cutOff);
    }
    const plot = make("svg", { x: margin - 4, y: 0, width: inside + 8, height: floor + 4, viewBox: `${margin - 4} 0 ${inside + 8} ${floor + 4}` }, svg);
    for (const run of new Set(lines.map((line) => line.run))) {
      for (const x of run.restarts.map((step) => xAt(position(run, step)))) make("line", { x1: x, x2: x, y1: 6, y2: floor, class: "restart" }, plot);
    }
    for (const { index, kind, color, raw, points, copies } of lines) {
      const path = (dots) => `M${dots.map(([x, y]) => `${xAt(x).toFixed(1)},${yAt(y).toFixed(1)}`).join("L")}`;
      if (points !== raw) make("path", { d: path(raw), class: "raw" }, plot).style.stroke = color;
      const curve = make("path", { d: path(points), class: kind, "data-run": index }, plot);
      curve.style.stroke = color;
      if (copies) curve.style.strokeDasharray = `7 ${7 * copies}`;
      if (points.length > (kind.startsWith("eval") ? 40 : 1)) continue; // a single point has no line
      for (const [x, y] of points) make("circle", { cx: xAt(x), cy: yAt(y), r: 2.6 }, plot).style.fill = color;
    }
    const brush = make("rect", { y: 6, height: floor - 6, class: "brush" }, svg);
    const cursor = make("line", { y1: 6, y2: floor, class: "cursor" }, svg);
    box.replaceChildren(svg);
    listen({ svg, brush, cursor, chart, lines, xAt, yAt, toX, left, right });
  }

  // --- pointer and keys ---

  function listen(view) {
    const { svg, brush, xAt, toX, left, right } = view;
    const pixelOf = (event) => (event.clientX - svg.getBoundingClientRect().x) / scaleOf(svg);
    let start = null, at = left;
    const stop = () => { start = null; brush.setAttribute("width", 0); };
    svg.onpointerdown = (event) => { start = pixelOf(event); svg.setPointerCapture(event.pointerId); };
    svg.onpointermove = (event) => {
      if (start === null) return hover(view, (at = toX(pixelOf(event))), event.clientX, event.clientY);
      brush.setAttribute("x", Math.min(start, pixelOf(event)));
      brush.setAttribute("width", Math.abs(start - pixelOf(event)));
    };
    svg.onpointerup = (event) => {
      const ends = [toX(start), toX(pixelOf(event))].sort((a, b) => a - b);
      const isDrag = Math.abs(start - pixelOf(event)) > 8 && ends[0] < ends[1];
      stop();
      if (isDrag) zoomTo(ends);
      else hover(view, ends[0], event.clientX, event.clientY); // a tap
    };
    svg.onpointercancel = stop; // the page scrolls instead
    svg.ondblclick = () => zoomTo(null);
    svg.onpointerleave = svg.onblur = () => leave(view);
    svg.onkeydown = (event) => {
      const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") zoomTo(null);
      if (!direction) return;
      event.preventDefault();
      at = Math.min(Math.max(at + (direction * (right - left)) / 40, left), right);
      const place = svg.getBoundingClientRect();
      hover(view, at, place.x + xAt(at) * scaleOf(svg), place.y + place.height / 2);
    };
  }

  const scaleOf = (svg) => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;

  function zoomTo(range) {
    state.zoom = range;
    tip.hidden = true;
    drawAll();
  }

  function leave({ svg, cursor }) {
    tip.hidden = true;
    cursor.classList.remove("on");
    svg.querySelectorAll(".near").forEach((path) => path.classList.remove("near"));
  }

  /** Show the values of all runs at `x`, and mark the run whose line is nearest to the pointer. */
  function hover(view, x, clientX, clientY) {
    const { svg, cursor, chart, lines, xAt, yAt } = view;
    const slack = (view.right - view.left) / 50, found = [];
    for (const line of lines) {
      if (x < line.points[0][0] - slack || x > last(line.points)[0] + slack) continue; // it ended before
      const after = search(line.points.map(([place]) => place), x);
      const point = smallest([line.points[after - 1], line.points[after]].filter(Boolean), ([place]) => Math.abs(place - x));
      found.push({ ...line, point });
    }
    if (!found.length) return leave(view);
    const top = svg.getBoundingClientRect().y;
    const snapped = smallest(found, ({ point }) => Math.abs(point[0] - x)).point[0];
    const nearest = smallest(found, ({ point }) => Math.abs(top + scaleOf(svg) * yAt(point[1]) - clientY)).index;
    set(cursor, { x1: xAt(snapped), x2: xAt(snapped) }).classList.add("on");
    const isNear = (index) => runs.length > 1 && index === nearest;
    svg.querySelectorAll("[data-run]").forEach((path) => path.classList.toggle("near", isNear(Number(path.dataset.run))));

    const table = document.createElement("table"), names = [...new Set(found.map(({ name }) => name))];
    const addRow = (texts) => {
      const row = table.insertRow();
      for (const text of texts) row.insertCell().textContent = text; // never as markup: names are anyone's
      return row;
    };
    const where = `${labels[state.axis].split(",")[0]} ${show(snapped)}${state.axis === "time" ? ` ${unitName}` : ""}`;
    addRow([where, ...names.map((name) => (names.length > 1 && kinds[kindOf(name)]?.label) || "")]);
    for (const index of new Set(found.map((line) => line.index))) {
      const hits = names.map((name) => found.find((line) => line.index === index && line.name === name));
      const row = addRow([runs.length > 1 ? runs[index].name : "", ...hits.map((hit) => (hit ? show(hit.point[1], chart) : ""))]);
      row.classList.toggle("near", isNear(index));
      if (runs.length > 1) row.cells[0].prepend(key(runs[index].color));
    }
    tip.replaceChildren(table);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect(), gap = 14;
    const beside = clientX + gap + width > document.documentElement.clientWidth ? clientX - gap - width : clientX + gap;
    tip.style.left = `${Math.max(beside, 4)}px`;
    tip.style.top = `${Math.max(Math.min(clientY + gap, innerHeight - height - 4), 4)}px`;
  }

  // --- controls ---

  function key(color) {
    const element = document.createElement("span");
    element.className = "key";
    element.style.background = `var(--${color})`;
    return element;
  }

  /** Return a button that calls `toggle` and is then pressed if that returned true. */
  function switchFor(text, isOn, toggle, color) {
    const button = document.createElement("button");
    button.textContent = button.title = text;
    button.ariaPressed = isOn;
    if (color) button.prepend(key(color));
    button.onclick = () => {
      button.ariaPressed = toggle();
      drawAll();
    };
    return button;
  }

  const chip = (text, id, color) => switchFor(text, !state.hidden.has(id), () => state.hidden.delete(id) || !state.hidden.add(id), color);
  const present = Object.keys(kinds).filter((kind) => charts.some((chart) => chart.names.some((name) => kindOf(name) === kind)));
  const legend = document.getElementById("legend");
  if (present.length > 1) legend.append(...present.map((kind) => chip(kinds[kind].label, kind, runs.length > 1 ? null : kinds[kind].color)));
  if (runs.length > 1) legend.append(...runs.map((run) => chip(run.name, `run ${run.name}`, run.color)));
  const axes = tools.querySelectorAll("[name=axis]");
  axes.forEach((input) => {
    input.checked = input.value === state.axis;
    input.onchange = () => { state.axis = input.value; zoomTo(null); };
  });
  function allowAxes() {
    const isKnown = { step: () => true, epoch: (run) => run.steps_per_epoch, time: (run) => run.clock };
    axes.forEach((input) => (input.disabled = !runs.every(isKnown[input.value])));
  }
  const slider = document.getElementById("smoothing"), weight = document.getElementById("weight");
  slider.value = state.smoothing;
  weight.textContent = state.smoothing.toFixed(2);
  slider.oninput = () => {
    state.smoothing = Number(slider.value);
    weight.textContent = state.smoothing.toFixed(2);
    drawAll();
  };
  reset.onclick = () => zoomTo(null);
  charts.forEach((chart, number) => {
    chart.isLog = chosen.logs?.includes(chart.names[0]) ?? false;
    cards[number].querySelector("h3").append(switchFor("log", chart.isLog, () => (charts[number].isLog = !charts[number].isLog)));
  });
  // A page that is live has got new numbers of the same runs and charts.
  document.addEventListener("news", () => {
    const isLog = charts.map((chart) => chart.isLog);
    ({ runs, charts, kinds, cutOff } = read());
    charts.forEach((chart, number) => (chart.isLog = isLog[number]));
    start();
  });

  function start() {
    chooseUnit();
    allowAxes();
    sortRows();
    filterRows();
    drawAll();
  }

  // --- the table of runs ---

  let sorted = null; // the column, and 1 or -1

  function sortRows() {
    const table = document.querySelector("#top table");
    if (!table || !sorted) return;
    const [column, sign] = sorted, [head, ...rows] = table.rows;
    const number = (row) => parseFloat(row.cells[column].textContent.replaceAll(",", ""));
    const compare = (a, b) => number(a) - number(b) || a.cells[column].textContent.localeCompare(b.cells[column].textContent);
    const isKnown = (row) => row.cells[column].textContent !== "–";
    rows.sort((a, b) => isKnown(b) - isKnown(a) || sign * compare(a, b));
    [...head.cells].forEach((cell, place) => (cell.ariaSort = place !== column ? "none" : sign > 0 ? "ascending" : "descending"));
    rows[0].parentNode.append(...rows);
  }

  function sortBy(cell) {
    sorted = [cell.cellIndex, sorted?.[0] === cell.cellIndex ? -sorted[1] : 1];
    sortRows();
  }

  const filter = document.getElementById("filter");

  /** Hide the rows that lack one of the words. */
  function filterRows() {
    const words = filter ? filter.value.toLowerCase().split(/\s+/) : [];
    for (const row of document.querySelectorAll("#top tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  }

  if (filter) {
    filter.hidden = false;
    filter.oninput = filterRows;
  }

  document.addEventListener("click", (event) => {
    const cell = event.target.closest("#top th");
    if (cell) sortBy(cell);
  });

  tools.hidden = false;
  addEventListener("resize", drawAll);
  start();
})();
