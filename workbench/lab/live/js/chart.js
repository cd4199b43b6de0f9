// One chart of a board: its words, its place, its Vega view, and the rows that the view shows.

class Chart {
  constructor(figure) {
    this.rows = [];
    this.newRows = []; // not yet in the view
    this.reset = true; // whether the view drops its rows first
    this.passed = false; // whether it drops its open rows
    this.view = null;
    this.root = make("figure", "wb-figure");
    this.heading = make("figcaption", "wb-title");
    this.source = make("div", "wb-source");
    this.place = make("div", "wb-chart");
    this.placeholder = make("div", "wb-empty");
    this.root.append(this.heading, this.source, this.placeholder, this.place);
    this.describe(figure);
  }

  describe(figure) {
    this.figure = figure;
    this.root.dataset.name = figure.name;
    this.root.classList.toggle("wb-wide", Boolean(figure.wide));
    this.place.setAttribute("role", "img");
    this.place.setAttribute("aria-label", `${figure.title}. ${figure.subtitle}`);
    this.heading.textContent = figure.title;
    this.source.textContent = figure.subtitle;
    this.placeholder.textContent = figure.empty;
  }

  // change: {rows, append}; appended rows that are open take the place of the open ones
  addRows({ rows, append }) {
    if (!append) {
      this.rows = [];
      this.newRows = [];
      this.reset = true;
    } else if (rows.some((row) => row.open)) {
      this.rows = this.rows.filter((row) => !row.open);
      this.newRows = this.newRows.filter((row) => !row.open);
      this.passed = true;
    }
    this.rows.push(...rows);
    this.newRows.push(...rows);
  }

  async draw() {
    const empty = this.rows.length === 0;
    this.placeholder.hidden = !empty;
    this.place.hidden = empty;
    if (empty) return;
    if (this.view === null) await this.build();
    const change = this.view.changeset();
    if (this.reset) change.remove(() => true);
    else if (this.passed) change.remove((row) => row.open);
    change.insert(this.newRows);
    this.newRows = [];
    this.reset = this.passed = false;
    this.view.change("rows", change);
    this.view.resize(); // else the layout of the empty chart stays, with clipped labels
    await this.view.runAsync();
    this.root.dataset.rows = String(this.rows.length);
  }

  async build() {
    const { $schema, ...spec } = structuredClone(this.figure.spec); // the schema named is the one for saved notebooks
    const config = themeConfig(this.place);
    const options = { actions: false, renderer: "canvas", mode: "vega-lite", config, logLevel: 1 };
    this.embedded = await vegaEmbed(this.place, spec, options);
    this.view = this.embedded.view;
    this.newRows = [...this.rows];
    this.reset = true;
  }

  fit() {
    const width = this.place.clientWidth;
    if (this.view !== null && width > 0 && width !== this.width) {
      this.width = width;
      this.view.width(width).resize().runAsync();
    }
  }

  finalize() {
    this.embedded?.finalize();
    this.embedded = null;
    this.view = null;
  }
}
