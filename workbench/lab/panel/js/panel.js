// The planner's controls. Each is a view of the plan in the kernel: what a person does goes there as a numbered message,
// one at a time, and while one is on its way nothing that arrives is shown, for it would be older than the page.

const ANSWER_TIMEOUT_MS = 10_000; // a later answer is not waited for
const MAX_FILE_BYTES = 1_000_000; // of a plan file
const KEYBOARD_TAGS = ["input", "select", "button", "summary"];
let panels = 0;

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (KEYBOARD_TAGS.includes(tag)) node.dataset.lmSuppressShortcuts = "true"; // keys pressed here are not the notebook's
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// One control with its label, the origin of its value (plan, preset, auto or none), and its problem.
class Field {
  constructor(declared, id, edit) {
    Object.assign(this, declared); // {name, label, form, hint, options}
    this.edit = (value) => edit(this.name, value);
    this.root = make("div", "wb-field");
    this.root.dataset.name = this.name;
    this.input = this.build();
    this.input.id = id;
    this.input.title = this.hint;
    const label = make("label", "wb-label", this.label);
    label.htmlFor = id;
    label.title = this.hint;
    this.origin = make("span", "wb-origin");
    const head = make("div", "wb-head");
    head.append(label, this.origin);
    this.problem = make("div", "wb-problem");
    this.problem.id = `${id}-problem`;
    this.problem.setAttribute("role", "alert");
    this.input.setAttribute("aria-describedby", this.problem.id);
    this.root.append(head, this.place(), this.problem);
  }

  build() {
    const input = make(this.form === "choice" ? "select" : "input");
    if (this.form === "choice") input.onchange = () => this.edit(this.options[input.selectedIndex][1]);
    else if (this.form === "size") this.slide(input);
    else if (this.form === "switch") this.toggle(input);
    else this.type(input);
    return input;
  }

  slide(input) {
    input.type = "range";
    input.min = "0";
    input.step = "1";
    this.readout = make("span", "wb-readout");
    this.readout.setAttribute("aria-hidden", "true"); // the control itself says its value
    input.oninput = () => {
      this.read();
      this.edit(this.options[input.valueAsNumber][1]);
    };
  }

  toggle(input) {
    input.type = "checkbox";
    input.onchange = () => this.edit(input.checked);
  }

  // Sent on Enter or when the field is left; Escape puts back what was there.
  type(input) {
    input.type = "text";
    input.autocomplete = "off";
    input.spellcheck = false;
    if (this.form === "number") input.inputMode = "decimal";
    input.oninput = () => (this.dirty = true);
    input.onchange = () => this.commit(); // where the field is left
    input.onkeydown = ({ key }) => {
      if (key === "Enter") this.commit(); // JupyterLab keeps the browser from doing so
      if (key !== "Escape") return;
      this.dirty = false;
      input.value = this.text;
    };
  }

  commit() {
    if (!this.dirty) return;
    this.dirty = false;
    this.edit(this.input.value);
  }

  place() {
    if (this.form !== "size") return this.input;
    const line = make("div", "wb-slider");
    line.append(this.input, this.readout);
    return line;
  }

  // shown: {value, text, origin, problem, options where they depend on the plan}
  show(shown) {
    this.text = shown.text;
    this.origin.textContent = shown.origin;
    if (this.problem.textContent !== shown.problem) this.problem.textContent = shown.problem;
    this.root.classList.toggle("wb-wrong", Boolean(shown.problem));
    this.input.setAttribute("aria-invalid", String(Boolean(shown.problem)));
    if (this.form === "choice" || this.form === "size") this.choose(shown);
    else if (this.form === "switch") this.input.checked = Boolean(shown.value);
    else if (!this.dirty && this.input.value !== shown.text) this.input.value = shown.text;
  }

  choose({ value, options }) {
    this.offer(options || this.declared || this.options);
    const index = this.options.findIndex((option) => same(option[1], value));
    if (this.form === "choice") this.input.selectedIndex = index;
    else {
      this.input.value = String(index);
      this.read();
    }
  }

  offer(options) {
    this.declared ??= this.options;
    if (same(options, this.offered)) return;
    this.offered = this.options = options;
    if (this.form === "size") {
      this.input.max = String(options.length - 1);
      this.input.disabled = options.length < 2;
    } else this.input.replaceChildren(...options.map(([text]) => make("option", "", text)));
  }

  read() {
    const text = this.options[this.input.valueAsNumber]?.[0] ?? "";
    this.readout.textContent = text;
    this.input.setAttribute("aria-valuetext", text);
  }
}

class Panel {
  constructor(model, element) {
    this.model = model;
    this.id = `wb-panel-${++panels}`;
    this.fields = new Map();
    this.folds = [];
    this.queue = [];
    this.sent = model.get("shown").acknowledged;
    this.root = make("div", "wb-panel");
    this.root.append(this.tools(), ...model.get("groups").map((group) => this.group(group)));
    element.append(this.root);
    const update = () => this.show();
    model.on("change:shown", update);
    this.dispose = () => model.off("change:shown", update);
    this.show();
  }

  group({ title, fields }) {
    const grid = make("div", "wb-fields");
    for (const declared of fields) {
      const field = new Field(declared, `${this.id}-${declared.name}`, (name, value) =>
        this.request({ type: "edit", name, value }),
      );
      this.fields.set(declared.name, field);
      grid.append(field.root);
    }
    if (!title) return grid;
    const fold = make("details", "wb-fold");
    const summary = make("summary", "", title);
    const note = make("span", "wb-note");
    summary.append(note);
    fold.append(summary, grid);
    this.folds.push({ fold, note, names: fields.map((field) => field.name) });
    return fold;
  }

  tools() {
    const bar = make("div", "wb-tools");
    this.undo = this.button("Undo", "Take the last change back", () => this.request({ type: "undo" }));
    this.reset = this.button("Reset", "Back to the plan that was opened", () => this.request({ type: "reset" }));
    const label = make("label", "wb-label", "Plan file");
    this.path = make("input", "wb-path");
    this.path.id = label.htmlFor = `${this.id}-path`;
    this.path.spellcheck = false;
    this.path.onchange = () => this.request({ type: "path", value: this.path.value });
    this.path.onkeydown = ({ key }) => {
      if (key === "Enter") this.path.onchange();
    };
    const load = this.button("Load", "Open the plan file of that name", () => this.request({ type: "load" }));
    const file = make("input");
    file.type = "file";
    file.accept = ".yaml,.yml";
    file.hidden = true;
    file.onchange = () => this.upload(file);
    const upload = this.button("Upload …", "Open a plan file of this computer", () => file.click());
    bar.append(this.undo, this.reset, label, this.path, load, upload, file);
    return bar;
  }

  button(text, hint, press) {
    const node = make("button", "wb-button", text);
    node.type = "button";
    node.title = hint;
    node.onclick = press;
    return node;
  }

  async upload(input) {
    const file = input.files[0];
    if (!file) return;
    const text = file.size > MAX_FILE_BYTES ? "" : await file.text();
    input.value = "";
    this.request({ type: "upload", name: file.name, text });
  }

  // A later edit of the same control takes the place of one that has not been sent.
  request(message) {
    const last = this.queue.at(-1);
    if (message.type === "edit" && last?.name === message.name) this.queue.pop();
    this.queue.push(message);
    this.next();
  }

  next() {
    const late = performance.now() - this.since > ANSWER_TIMEOUT_MS;
    if (this.queue.length === 0 || (this.pending() && !late)) return;
    this.sent = Math.max(this.sent, this.model.get("shown").acknowledged) + 1;
    this.since = performance.now();
    this.model.send({ ...this.queue.shift(), number: this.sent });
  }

  pending() {
    return this.sent > this.model.get("shown").acknowledged;
  }

  show() {
    if (this.pending()) return;
    this.next();
    if (this.pending()) return;
    const { fields, undo, reset, path } = this.model.get("shown");
    this.fields.forEach((field, name) => fields[name] && field.show(fields[name]));
    this.undo.disabled = !undo;
    this.reset.disabled = !reset;
    if (document.activeElement !== this.path) this.path.value = path;
    this.folds.forEach((fold) => this.describeFold(fold, fields));
  }

  // A group with an illegal field is always open.
  describeFold({ fold, note, names }, fields) {
    const count = (test) => names.filter((name) => fields[name] && test(fields[name])).length;
    const illegal = count((field) => field.problem);
    const set = count((field) => field.origin === "");
    note.textContent = illegal ? ` · ${illegal} to fix` : set ? ` · ${set} set` : "";
    note.classList.toggle("wb-problem", illegal > 0);
    if (illegal) fold.open = true;
  }
}

function render({ model, el }) {
  const panel = new Panel(model, el);
  return () => panel.dispose();
}

export default { render };
