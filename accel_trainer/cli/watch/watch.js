"use strict";
// Asks for the page again when its runs have changed, and keeps what the reader has chosen.
(() => {
  const live = document.getElementById("live");
  const parts = ["top", "data", "details"];
  const silence = 30000; // milliseconds; the server says something every 10 s
  let isAsking = false;
  let heard = 0;

  function say(text) {
    if (live.textContent !== text) live.textContent = text;
  }

  const sayUpdated = () => say(`live, updated ${new Date().toLocaleTimeString()}`);

  async function renew(version) {
    if (isAsking || String(version) === document.body.dataset.version) return;
    isAsking = true;
    try {
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
    } finally {
      isAsking = false;
    }
  }

  const events = new EventSource("events");
  events.onopen = sayUpdated;
  events.onerror = () => say("not live: accel-trainer watch has ended, or cannot be reached");
  events.onmessage = (event) => {
    if (Date.now() - heard > silence) sayUpdated();
    heard = Date.now();
    renew(event.data);
  };
  setInterval(() => {
    if (heard && Date.now() - heard > silence) say("not live: nothing was heard for half a minute");
  }, 1000);
})();
