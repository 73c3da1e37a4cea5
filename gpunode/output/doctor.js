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
    $("reset").hidden = !narrowed && document.activeElement !== $("reset");
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
    const target = document.getElementById(location.hash.slice(1)); /* ids are letters, digits and hyphens */
    if (!target) return;
    if (target.hidden) reset();
    const closed = target.closest("details");
    if (closed) closed.open = true;
    target.scrollIntoView();
  }

  /* its label is what a screen reader says, and has to begin with what is seen */
  function copied(button, done) {
    if (button.textContent.startsWith(done ? "Copied" : "Not")) return;
    const before = [button.textContent, button.getAttribute("aria-label")];
    button.textContent = done ? "Copied" : "Not copied";
    button.removeAttribute("aria-label");
    setTimeout(() => {
      button.textContent = before[0];
      if (before[1]) button.setAttribute("aria-label", before[1]);
    }, 2000);
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
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  $("reset").addEventListener("click", reset);
  window.addEventListener("hashchange", reveal);
  /* paper can't be opened: everything is, and closed again afterwards */
  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = Array.from(document.querySelectorAll("details:not([open])"));
    for (const one of closed) one.open = true;
  });
  window.addEventListener("afterprint", () => { for (const one of closed) one.open = false; });
  form.hidden = false;
  apply();
  reveal();
})();
