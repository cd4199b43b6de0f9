// A board: a banner and a grid of charts. Declarations and the banner are synchronised state, so a reloaded page has
// them at once; rows come as messages, coalesced to one change of every chart a frame.

function disconnected(banner) {
  const headline = "Not connected: the kernel that kept this view up to date is gone";
  return { ...banner, tone: "calm", headline, lines: [banner.reconnect || ""], buttons: [], fraction: null };
}

class Board {
  constructor(model, element) {
    this.model = model;
    this.charts = new Map();
    this.touched = new Set();
    this.queued = false;
    this.busy = false;
    this.root = make("div", "wb-board");
    this.banner = new Banner((action) => model.send({ type: "press", action }));
    this.grid = make("div", "wb-grid");
    this.root.append(this.banner.root, this.grid);
    element.append(this.root);
    this.cleanups = [
      this.listen("change:figures", () => this.declareFigures()),
      this.listen("change:banner", () => this.showBanner()),
      this.listen("msg:custom", (message) => this.receive(message)),
      this.listen("comm_live_update", () => this.showBanner()), // the kernel was restarted, or is gone
      watchTheme(() => this.applyTheme()),
      this.watchSize(),
    ];
    this.showBanner();
    this.declareFigures();
    model.send({ type: "hello" });
  }

  listen(event, handler) {
    this.model.on(event, handler);
    return () => this.model.off(event, handler);
  }

  watchSize() {
    const observer = new ResizeObserver(() => this.charts.forEach((chart) => chart.fit()));
    observer.observe(this.grid);
    return () => observer.disconnect();
  }

  // A view whose kernel is gone must not look live: JupyterLab marks such widgets in the page.
  showBanner() {
    setTimeout(() => {
      const banner = this.model.get("banner");
      const lost = this.root.closest(".jupyter-widgets-disconnected") !== null && (banner.buttons || []).length > 0;
      this.banner.show(lost ? disconnected(banner) : banner);
    });
  }

  // A chart is built again only where its declaration changed; its rows stay.
  declareFigures() {
    const figures = this.model.get("figures");
    for (const [name, chart] of this.charts) {
      if (!figures.some((figure) => figure.name === name)) {
        chart.finalize();
        chart.root.remove();
        this.charts.delete(name);
      }
    }
    for (const figure of figures) {
      const chart = this.charts.get(figure.name);
      if (chart === undefined) this.charts.set(figure.name, new Chart(figure));
      else {
        const stale = JSON.stringify(chart.figure.spec) !== JSON.stringify(figure.spec);
        chart.describe(figure);
        if (stale) chart.finalize();
      }
      this.touched.add(figure.name);
    }
    this.grid.replaceChildren(...figures.map((figure) => this.charts.get(figure.name).root));
    this.scheduleFlush();
  }

  // message: {type: "rows", number, charts: {name: {rows, append}}}
  receive(message) {
    if (message.type === "reveal") this.reveal();
    if (message.type !== "rows") return;
    for (const [name, change] of Object.entries(message.charts)) {
      this.charts.get(name)?.addRows(change);
      this.touched.add(name);
    }
    this.number = message.number;
    this.scheduleFlush();
  }

  // Scrolled to now, and again when its charts are drawn: an empty board at the page's end cannot reach the top.
  reveal() {
    this.model.send({ type: "revealed" });
    this.root.scrollIntoView({ block: "start" });
    this.revealing = true;
  }

  applyTheme() {
    // The theme's style sheet arrives a little after the attribute.
    setTimeout(() => {
      this.charts.forEach((chart, name) => {
        chart.finalize();
        this.touched.add(name);
      });
      this.scheduleFlush();
    }, 300);
  }

  scheduleFlush() {
    if (this.queued || this.busy) return;
    this.queued = true;
    const soon = document.hidden ? (work) => setTimeout(work, 250) : requestAnimationFrame;
    soon(() => this.flush());
  }

  async flush() {
    this.queued = false;
    this.busy = true;
    const names = [...this.touched];
    this.touched.clear();
    const number = this.number;
    try {
      await Promise.all(names.map((name) => this.charts.get(name)?.draw()));
    } catch (error) {
      console.error("workbench: a chart could not be drawn", error);
    }
    this.busy = false;
    if (this.revealing && names.length > 0) {
      this.revealing = false;
      this.root.scrollIntoView({ block: "start" });
    }
    if (number !== undefined) this.root.dataset.number = String(number);
    if (this.touched.size > 0) this.scheduleFlush();
  }

  dispose() {
    for (const step of this.cleanups) step();
    this.charts.forEach((chart) => chart.finalize());
  }
}

function render({ model, el }) {
  const board = new Board(model, el);
  return () => board.dispose();
}

export default { render };
