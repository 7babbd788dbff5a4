"use strict";
// Asks for the page again when its runs have changed, and keeps what the reader has chosen.
(() => {
  const live = document.getElementById("live");
  const parts = ["top", "data", "details"];
  const silence = 30000; // milliseconds
  const gone = "not live: accel-trainer watch has ended, or cannot be reached";
  let isAsking = false;

  function say(text) {
    if (live.textContent !== text) live.textContent = text;
  }

  const sayUpdated = () => say(`live, updated ${new Date().toLocaleTimeString()}`);

  async function renew() {
    const answer = await fetch(location.href);
    const text = await answer.text();
    if (!answer.ok) return say(text);
    const page = new DOMParser().parseFromString(text, "text/html");
    if (page.body.dataset.shape !== document.body.dataset.shape) return location.reload();
    const wasOpen = [...document.querySelectorAll("details")].map((each) => each.open);
    for (const id of parts) {
      const part = page.getElementById(id);
      if (part) document.getElementById(id).replaceWith(part);
    }
    document.querySelectorAll("details").forEach((each, number) => (each.open = wasOpen[number] ?? each.open));
    document.body.dataset.version = page.body.dataset.version;
    document.dispatchEvent(new Event("news"));
    sayUpdated();
  }

  async function look() {
    if (isAsking) return;
    isAsking = true;
    try {
      const answer = await fetch("version", { signal: AbortSignal.timeout(silence) });
      const text = await answer.text();
      if (!answer.ok) say(answer.status === 404 ? gone : text); // of a server that was started again
      else if (text !== document.body.dataset.version) await renew();
      else if (!live.textContent.startsWith("live,")) sayUpdated();
    } catch {
      say(gone);
    } finally {
      isAsking = false;
    }
  }

  look();
  setInterval(look, 1000);
})();
