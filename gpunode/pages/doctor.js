"use strict";
(function () {
  const $ = (id) => document.getElementById(id);
  const form = $("filters");
  const rows = Array.from(document.querySelectorAll("[data-state]"));
  const boxes = Array.from(form.querySelectorAll("input[name=state]"));
  const layers = Array.from(document.querySelectorAll("details.layer"));

  function apply() {
    const words = $("text").value.toLowerCase().split(/\s+/).filter(Boolean);
    const states = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    const layer = $("layer").value;
    const narrowed = words.length > 0 || layer !== "" || states.size < boxes.length;
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const fits = states.has(row.dataset.state) && (!layer || row.dataset.layer === layer) &&
        words.every((word) => text.includes(word));
      row.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    for (const one of layers) {
      const left = one.querySelector("[data-state]:not([hidden])") !== null;
      one.hidden = !left;
      if (narrowed) one.open = left && (words.length > 0 || layer !== "");
    }
    for (const section of document.querySelectorAll("section.problems, section.all, section[aria-labelledby=notes]"))
      section.hidden = section.querySelector("[data-state]:not([hidden])") === null;
    $("shown").textContent = narrowed ? shown + " of " + rows.length + " checks" : "";
  }

  function reset() {
    $("text").value = "";
    $("layer").value = "";
    for (const box of boxes) box.checked = true;
    for (const one of layers) one.open = false;
    apply();
  }

  /* a link may lead to a check that a filter or a closed layer hides */
  function reveal() {
    const target = location.hash ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null;
    if (!target) return;
    if (target.hidden) reset();
    const closed = target.closest("details");
    if (closed) closed.open = true;
    target.scrollIntoView();
  }

  function copied(button, done) {
    const before = button.textContent;
    button.textContent = done ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = before; }, 2000);
  }

  /* without navigator.clipboard (an older browser, a page from a mail) the selection is copied */
  function bySelection(text) {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "unseen";
    document.body.append(area);
    area.select();
    let done = false;
    try { done = document.execCommand("copy"); } catch (error) { done = false; }
    area.remove();
    return done;
  }

  function copy(button, text) {
    if (navigator.clipboard && window.isSecureContext)
      navigator.clipboard.writeText(text).then(() => copied(button, true), () => copied(button, bySelection(text)));
    else copied(button, bySelection(text));
  }

  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", () => copy(button, button.id === "json"
      ? JSON.stringify(JSON.parse($("report").textContent), null, 2)
      : button.previousElementSibling.textContent));
  }
  for (const one of document.querySelectorAll(".fix")) {
    const name = one.closest("[id]");
    if (name) one.querySelector("button").setAttribute("aria-label", "Copy the command of " + name.id);
  }
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  $("reset").addEventListener("click", reset);
  window.addEventListener("hashchange", reveal);
  window.addEventListener("beforeprint", () => { for (const one of layers) one.open = true; });
  form.hidden = false;
  apply();
  reveal();
})();
