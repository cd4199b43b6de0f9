// The lines above the charts: what is going on, how far it is, and what can be done about it.

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

// Content: {tone, headline, lines, fraction (0..1 or null), buttons: [{label, action, hint, disabled}], code, turn}.
// Each part is replaced only where it changed: a button that vanishes under the pointer cannot be pressed.
class Banner {
  constructor(press) {
    this.press = press;
    this.root = make("div", "wb-banner");
    this.headline = make("div", "wb-headline");
    this.headline.setAttribute("role", "status");
    this.lines = make("div");
    this.code = make("pre", "wb-code");
    this.words = make("div", "wb-words");
    this.words.append(this.headline, this.lines, this.code);
    this.buttons = make("div", "wb-buttons");
    this.track = make("div", "wb-track");
    this.track.setAttribute("role", "progressbar");
    this.track.setAttribute("aria-valuemin", "0");
    this.track.setAttribute("aria-valuemax", "100");
    this.done = make("div", "wb-done");
    this.track.append(this.done);
    this.root.append(this.words, this.buttons, this.track);
  }

  show({ tone, headline, lines, fraction, buttons, code, turn }) {
    this.root.dataset.tone = tone || "calm";
    if (this.headline.textContent !== headline) this.headline.textContent = headline || "";
    this.lines.replaceChildren(...(lines || []).map((line) => make("div", "wb-line", line)));
    this.code.hidden = !code;
    if (this.code.textContent !== code) this.code.textContent = code || "";
    this.offer(buttons || [], turn);
    this.track.hidden = fraction === null || fraction === undefined;
    const percent = 100 * Math.min(1, Math.max(0, fraction || 0));
    this.done.style.width = `${percent}%`;
    this.track.setAttribute("aria-valuenow", String(Math.round(percent)));
  }

  offer(buttons, turn) {
    const wanted = JSON.stringify([buttons, turn]);
    if (wanted === this.offered) return;
    this.offered = wanted;
    const focused = this.buttons.contains(document.activeElement) ? document.activeElement.dataset.action : null;
    this.buttons.replaceChildren(...buttons.map((button) => this.button(button)));
    if (focused) this.buttons.querySelector(`[data-action="${focused}"]`)?.focus();
  }

  button({ label, action, hint, disabled }) {
    const node = make("button", "wb-button", label);
    node.dataset.action = action;
    node.dataset.lmSuppressShortcuts = "true"; // Enter presses it, and is not the notebook's
    node.disabled = Boolean(disabled);
    node.title = hint || "";
    node.onclick = () => {
      node.disabled = true; // until the kernel answers
      this.press(action);
    };
    return node;
  }
}
