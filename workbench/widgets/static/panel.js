// One panel: picture, cursor, zoom, sliders, readouts, export. All text goes in through textContent.

let serial = 0;

/** Make an element; attributes and handlers by name, children as elements or text. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  // JupyterLab's single-key shortcuts look at the focused element itself: a mark on the root alone lets them eat the arrows.
  element.dataset.lmSuppressShortcuts = "true";
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

class Panel {
  /**
   * @param source ProgramSource or RecordedSource
   * @param options {title, heading, badge, caption, cursor, window, values, table, labels, theme(), onchange(state)}
   */
  constructor(source, options) {
    this.source = source;
    this.options = options;
    this.values = Object.fromEntries(source.controls.map((c) => [c.id, options.values?.[c.id] ?? c.value]));
    source.update(this.values);
    this.cursor = Math.min(Math.max(options.cursor ?? 0, source.extent[0]), source.extent[1]);
    this.window = options.window ? [...options.window] : null;
    this.stale = { base: true, cursor: true };
    this.element = this.build();
    this.observer = new ResizeObserver(() => this.invalidate());
    this.observer.observe(this.stage);
  }

  dispose() {
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.announcing);
  }

  // ---- construction

  build() {
    const id = `hw${++serial}`;
    this.base = h("canvas", { class: "hw-base", "aria-hidden": "true" });
    this.overlay = h("canvas", { class: "hw-overlay", "aria-hidden": "true" });
    this.surfaces = [new CanvasSurface(this.base), new CanvasSurface(this.overlay)];
    this.stage = h(
      "div",
      {
        class: "hw-stage",
        tabindex: "0",
        role: "slider",
        "aria-label": `Time cursor${this.options.title ? `, ${this.options.title}` : ""}`,
        "aria-describedby": `${id}-help`,
        onkeydown: (event) => this.key(event),
        onpointerdown: (event) => this.press(event),
        onpointermove: (event) => this.drag(event),
        onpointerup: () => (this.dragging = false),
        onpointercancel: () => (this.dragging = false),
        ondblclick: (event) => this.zoom(0.5, this.timeAt(event)),
      },
      this.base,
      this.overlay,
    );
    this.stage.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.scroll = h("div", { class: "hw-scroll", hidden: "", "aria-hidden": "true", onpointerdown: (e) => this.scrollPress(e) });
    this.thumb = this.scroll.appendChild(h("div", { class: "hw-thumb" }));
    this.shares = h("span", { hidden: "" }, " · narrower than a pixel: a colour’s height is its share of the time");
    this.live = h("div", { class: "hw-live", "aria-live": "polite" });
    this.legend = h("ul", { class: "hw-legend", "aria-label": "Legend" });
    this.legendEntries = this.source.legend().map((kind) => ({ kind, label: this.options.labels[kind] ?? kind }));
    for (const { kind, label } of this.legendEntries)
      this.legend.append(h("li", {}, h("canvas", { "data-kind": kind, "aria-hidden": "true" }), label));
    const button = (text, label, action) =>
      h("button", { type: "button", class: "hw-button", "aria-label": label, title: label, onclick: action }, text);
    const tools = h(
      "div",
      { class: "hw-tools", role: "group", "aria-label": "View" },
      button("−", "Zoom out", () => this.zoom(2)),
      button("+", "Zoom in", () => this.zoom(0.5)),
      button("Fit", "Show the whole timeline", () => this.zoom(Infinity)),
      button("PNG", "Save as PNG", () => this.save("png")),
      button("SVG", "Save as SVG", () => this.save("svg")),
    );
    this.readoutCards = [];
    this.readoutList = h("dl", { class: "hw-readouts" });
    const element = h("section", { class: "hw-panel", "aria-label": this.options.title || "timeline" });
    if (this.options.heading) element.append(h("h4", { class: "hw-panel-title" }, this.options.heading));
    element.append(
      h("div", { class: "hw-bar" }, this.legend, tools),
      this.stage,
      this.scroll,
      h(
        "p",
        { class: "hw-help", id: `${id}-help` },
        "Drag, tap or use ← → to step through events · Shift: ten at once · Home, End · + − 0 to zoom",
        this.shares,
      ),
    );
    if (this.source.controls.length)
      element.append(h("div", { class: "hw-controls" }, ...this.source.controls.map((c, i) => this.control(c, `${id}-c${i}`))));
    element.append(this.readoutList, this.live);
    if (this.options.table) element.append(this.table(this.options.table));
    if (this.options.caption) element.append(h("p", { class: "hw-caption" }, this.options.caption));
    return element;
  }

  control(control, id) {
    const decimals = Math.max(0, Math.min(6, -Math.floor(Math.log10(control.step || 1) + 1e-9)));
    const show = (value) => `${Number(value).toFixed(decimals)}${control.unit ? ` ${control.unit}` : ""}`;
    const output = h("output", { for: id, class: "hw-value" }, show(this.values[control.id]));
    const input = h("input", {
      type: "range",
      id,
      min: control.min,
      max: control.max,
      step: control.step,
      "aria-valuetext": show(this.values[control.id]),
    });
    input.value = this.values[control.id];
    const change = () => {
      this.values[control.id] = input.valueAsNumber;
      output.textContent = show(input.valueAsNumber);
      input.setAttribute("aria-valuetext", output.textContent);
      input.style.setProperty("--hw-share", (input.valueAsNumber - control.min) / (control.max - control.min || 1));
      this.changed = true;
      this.invalidate();
    };
    input.addEventListener("input", change);
    const track = h("div", { class: "hw-track" }, input);
    input.style.setProperty("--hw-share", (this.values[control.id] - control.min) / (control.max - control.min || 1));
    if (control.report !== null && control.report !== undefined) {
      const mark = h(
        "button",
        {
          type: "button",
          class: "hw-mark",
          title: "Set the report’s value",
          "aria-label": `Set ${control.label} to the report’s value, ${show(control.report)}`,
          onclick: () => {
            input.value = control.report;
            change();
          },
        },
        `report ${Number(control.report).toFixed(decimals)}`,
      );
      mark.style.setProperty("--hw-share", (control.report - control.min) / (control.max - control.min || 1));
      track.append(mark);
    }
    return h("div", { class: "hw-control" }, h("label", { for: id }, control.label), output, track);
  }

  table({ title, columns, rows, start, end }) {
    const body = h("tbody");
    rows.forEach((cells, r) => {
      const go = () => {
        const length = Math.max(end[r] - start[r], (this.source.extent[1] - this.source.extent[0]) * 1e-9);
        this.goto(start[r], length * 5);
        this.stage.scrollIntoView({ block: "nearest" });
      };
      const first = h("button", { type: "button", class: "hw-row-button", onclick: go }, String(cells[0]));
      body.append(h("tr", {}, h("td", {}, first), ...cells.slice(1).map((cell) => h("td", {}, String(cell)))));
    });
    const head = h("thead", {}, h("tr", {}, ...columns.map((c) => h("th", { scope: "col" }, c))));
    const whole = h("table", {}, h("caption", {}, title), head, body);
    return h("div", { class: "hw-table", tabindex: "0", role: "region", "aria-label": title }, whole);
  }

  // ---- state

  view() {
    const [lo, hi] = this.window ?? this.source.extent;
    return { lo, hi, unit: this.source.unit };
  }

  goto(time, width = null) {
    const [first, last] = this.source.extent;
    this.cursor = Math.min(Math.max(time, first), last);
    if (width) this.setWindow(this.cursor - width * 0.4, this.cursor + width * 0.6);
    else this.reveal();
    this.invalidate();
  }

  setWindow(lo, hi) {
    const [first, last] = this.source.extent;
    const least = Math.max((last - first) * 1e-9, this.source.unit === "ns" ? 10 : 0);
    const width = Math.max(hi - lo, least);
    if (width >= (last - first) * 0.9999) this.window = null;
    else {
      const begin = Math.min(Math.max(lo, first), last - width);
      this.window = [begin, begin + width];
    }
    this.invalidate();
  }

  zoom(factor, about = null) {
    const { lo, hi } = this.view();
    if (factor === Infinity) this.window = null;
    const inside = this.cursor >= lo && this.cursor <= hi ? this.cursor : (lo + hi) / 2;
    const centre = about ?? inside;
    if (factor !== Infinity) this.setWindow(centre - (centre - lo) * factor, centre + (hi - centre) * factor);
    this.invalidate();
  }

  reveal() {
    const { lo, hi } = this.view();
    if (this.cursor < lo || this.cursor > hi) this.setWindow(this.cursor - (hi - lo) / 2, this.cursor + (hi - lo) / 2);
  }

  moveTo(time) {
    const [first, last] = this.source.extent;
    const windowBefore = this.window;
    this.cursor = Math.min(Math.max(time, first), last);
    this.reveal();
    this.invalidate(this.window !== windowBefore);
  }

  // ---- input

  timeAt(event) {
    const { lo, hi } = this.view();
    const box = this.stage.getBoundingClientRect();
    const { gutter, plotWidth } = this.geometry;
    const share = (event.clientX - box.left - gutter) / plotWidth;
    return lo + Math.min(Math.max(share, 0), 1) * (hi - lo);
  }

  press(event) {
    if (event.button !== 0) return;
    this.dragging = true;
    this.stage.setPointerCapture(event.pointerId);
    this.moveTo(this.timeAt(event));
  }

  drag(event) {
    if (this.dragging) this.moveTo(this.timeAt(event));
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    const { lo, hi } = this.view();
    const amount = event.deltaY || event.deltaX;
    if (event.shiftKey) this.setWindow(lo + ((hi - lo) * amount) / 600, hi + ((hi - lo) * amount) / 600);
    else this.zoom(Math.exp(Math.min(Math.max(amount, -120), 120) / 240), this.timeAt(event));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { lo, hi } = this.view();
    const [first, last] = this.source.extent;
    const step = (forward, count) => {
      let time = this.cursor;
      for (let i = 0; i < count; i++)
        time = nextBoundary(this.source.rows, time, forward, (last - first) * 1e-10) ?? (forward ? last : first);
      this.moveTo(time);
    };
    const actions = {
      ArrowRight: () => step(true, event.shiftKey ? 10 : 1),
      ArrowLeft: () => step(false, event.shiftKey ? 10 : 1),
      ArrowUp: () => step(true, event.shiftKey ? 10 : 1),
      ArrowDown: () => step(false, event.shiftKey ? 10 : 1),
      Home: () => this.moveTo(first),
      End: () => this.moveTo(last),
      PageDown: () => this.moveTo(this.cursor + (hi - lo) / 4),
      PageUp: () => this.moveTo(this.cursor - (hi - lo) / 4),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.zoom(Infinity),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  }

  scrollPress(event) {
    const box = this.scroll.getBoundingClientRect();
    const [first, last] = this.source.extent;
    const { lo, hi } = this.view();
    const timeOf = (e) => first + ((e.clientX - box.left) / box.width) * (last - first);
    const at = timeOf(event);
    const grip = at >= lo && at <= hi ? at - lo : (hi - lo) / 2;
    const move = (e) => this.setWindow(timeOf(e) - grip, timeOf(e) - grip + (hi - lo));
    move(event);
    this.scroll.setPointerCapture(event.pointerId);
    this.scroll.onpointermove = move;
    this.scroll.onpointerup = this.scroll.onpointercancel = () => (this.scroll.onpointermove = null);
  }

  // ---- drawing

  invalidate(base = true) {
    this.stale.base ||= base;
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    const width = this.stage.clientWidth;
    if (!width) return;
    if (this.changed) {
      this.changed = false;
      const [, lastBefore] = this.source.extent;
      this.source.update(this.values);
      if (this.window && this.source.extent[1] !== lastBefore) this.setWindow(...this.window);
      this.cursor = Math.min(this.cursor, this.source.extent[1]);
    }
    const theme = this.options.theme();
    const { rows } = this.source;
    const view = this.view();
    if (this.stale.base || theme !== this.drawnTheme) {
      this.geometry = layout(rows, width);
      this.surfaces[0].begin(width, this.geometry.height);
      this.shares.hidden = !drawBase(this.surfaces[0], rows, this.geometry, view, theme);
      if (theme !== this.drawnTheme) this.drawLegend(theme);
      this.drawnTheme = theme;
      this.stale.base = false;
      this.placeThumb();
    }
    this.surfaces[1].begin(width, this.geometry.height);
    drawCursor(this.surfaces[1], rows, this.geometry, view, this.cursor, theme);
    this.showReadouts();
    this.stage.dataset.frame = Number(this.stage.dataset.frame ?? 0) + 1;
    this.options.onchange?.();
  }

  drawLegend(theme) {
    for (const canvas of this.legend.querySelectorAll("canvas")) {
      const surface = new CanvasSurface(canvas);
      surface.begin(16, 12);
      drawSwatch(surface, 0, 0, canvas.dataset.kind, theme);
    }
  }

  placeThumb() {
    this.scroll.hidden = !this.window;
    if (!this.window) return;
    const [first, last] = this.source.extent;
    const share = (time) => ((time - first) / (last - first)) * 100;
    this.thumb.style.left = `${Math.min(share(this.window[0]), 99)}%`;
    this.thumb.style.width = `${Math.max(share(this.window[1]) - share(this.window[0]), 1)}%`;
  }

  showReadouts() {
    const { unit, extent } = this.source;
    const now = formatValue(this.cursor, unit, extent[1] - extent[0]);
    const readouts = this.source.readouts(this.cursor);
    while (this.readoutCards.length < readouts.length) {
      const card = { label: h("dt"), text: h("dd") };
      this.readoutCards.push(card);
      this.readoutList.append(h("div", { class: "hw-card" }, card.label, card.text));
    }
    readouts.forEach(({ label, text }, i) => {
      const card = this.readoutCards[i];
      if (card.label.textContent !== label) card.label.textContent = label;
      if (card.text.textContent !== text) card.text.textContent = text;
    });
    const spoken = `time ${now}; ${readouts.map((r) => `${r.label}: ${r.text}`).join("; ")}`;
    this.stage.setAttribute("aria-valuemin", extent[0]);
    this.stage.setAttribute("aria-valuemax", extent[1]);
    this.stage.setAttribute("aria-valuenow", this.cursor);
    this.stage.setAttribute("aria-valuetext", spoken);
    // Spoken once the reader rests: a live region that changes at every key drowns the listener.
    clearTimeout(this.announcing);
    if (this.spoken === undefined) this.spoken = spoken;
    else if (spoken !== this.spoken)
      this.announcing = setTimeout(() => {
        this.spoken = this.live.textContent = spoken;
      }, 700);
  }

  // ---- export

  picture(surface, scale) {
    const theme = this.options.theme();
    const width = Math.max(this.stage.clientWidth, 400);
    const header = (target) => drawHeader(target, width, this.options.fullTitle, this.options.badge, this.legendEntries, theme);
    const probe = new SvgSurface();
    probe.begin(width, 1);
    const geometry = layout(this.source.rows, width, header(probe));
    const height = geometry.top + geometry.height + 6;
    surface.begin(width, height, theme.background, scale);
    header(surface);
    drawBase(surface, this.source.rows, geometry, this.view(), theme);
    drawCursor(surface, this.source.rows, geometry, this.view(), this.cursor, theme);
  }

  async save(type) {
    const name = `${(this.options.fullTitle || "timeline").toLowerCase().replace(/[^a-z0-9]+/g, "_").slice(0, 60)}.${type}`;
    let blob;
    if (type === "svg") {
      const surface = new SvgSurface();
      this.picture(surface);
      blob = new Blob([surface.finish()], { type: "image/svg+xml" });
    } else {
      const canvas = h("canvas");
      this.picture(new CanvasSurface(canvas), 2);
      blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
    }
    const link = h("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
}
