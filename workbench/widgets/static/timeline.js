// Entry of the timeline widget (anywidget front-end module): theme, tabs or stacked panels, state kept with the notebook.

const HEX = /^#[0-9a-f]{6}$/i;

/** Read the page's theme: JupyterLab's variables where they are set, our own otherwise. */
function readTheme(root, spec) {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  pen.canvas.width = pen.canvas.height = 1;
  const probe = root.appendChild(document.createElement("i"));
  // The style of an element resolves a mix of colours; one painted pixel lays a translucent one on the background.
  const colour = (name) => {
    probe.style.color = `var(${name})`;
    pen.fillStyle = getComputedStyle(probe).color;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b] = pen.getImageData(0, 0, 1, 1).data;
    return `#${[r, g, b].map((v) => v.toString(16).padStart(2, "0")).join("")}`;
  };
  const theme = {};
  for (const name of ["background", "ink", "soft", "grid"]) {
    if (theme.background) {
      pen.fillStyle = theme.background;
      pen.fillRect(0, 0, 1, 1);
    }
    theme[name] = colour(`--hw-${name}`);
  }
  probe.remove();
  theme.dark = Number.parseInt(theme.background.slice(1, 3), 16) < 128;
  theme.patterns = Object.fromEntries(Object.entries(spec.patterns).map(([k, v]) => [k, v === "x" ? "cross" : "slash"]));
  theme.colours = Object.fromEntries(Object.entries(spec.colours).filter(([, v]) => HEX.test(v)));
  theme.curveKinds = new Set(["headroom"]);
  theme.id = `${theme.background}${theme.ink}`;
  return theme;
}

async function inflate(view) {
  const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function render({ model, el }) {
  const spec = model.get("spec");
  const root = h("div", { class: "hw-timeline" });
  el.append(root);
  const cleanups = [];
  try {
    await fill(model, root, spec, cleanups);
    if (spec.hides_previous) hidePrevious(el);
  } catch (error) {
    root.append(h("p", { class: "hw-error", role: "alert" }, `This timeline cannot be drawn: ${error.message}`));
  }
  return () => {
    for (const cleanup of cleanups) cleanup();
  };
}

// JupyterLab renders into an element outside the page and attaches it later.
function hidePrevious(el, tries = 200) {
  const output = el.closest(".jp-OutputArea-child");
  if (output) output.previousElementSibling?.style.setProperty("display", "none");
  else if (tries) setTimeout(() => hidePrevious(el, tries - 1), 50);
}

async function fill(model, root, spec, cleanups) {
  const saved = model.get("state") ?? {};
  // Read at the first draw: JupyterLab renders into an element outside the page, where no style is known.
  let theme = null;
  if (spec.title) root.append(h("h3", { class: "hw-title" }, spec.title));
  if (spec.badge) root.append(h("p", { class: "hw-badge" }, spec.badge));
  const panels = new Map();
  let followed = saved._goto ?? 0;
  let saving;
  const remember = () => {
    // A message at every frame would queue behind the kernel; the state only has to survive a reload.
    clearTimeout(saving);
    saving = setTimeout(() => {
      const state = { _goto: followed };
      for (const [id, p] of panels) state[id] = { values: p.values, cursor: p.cursor, window: p.window };
      if (JSON.stringify(state) === JSON.stringify(model.get("state"))) return;
      model.set("state", state);
      model.save_changes();
    }, 500);
  };
  cleanups.push(() => clearTimeout(saving));
  const tabbed = spec.layout === "tabs" && spec.panels?.length > 1;
  const add = (id, source, options) => {
    const kept = saved[id] ?? {};
    const fullTitle = [...new Set([spec.title, options.title])].filter(Boolean).join(" · ");
    // The switch and the title above say it already.
    const heading = tabbed || options.title === spec.title ? "" : options.title;
    const panel = new Panel(source, {
      ...options,
      heading,
      fullTitle,
      badge: spec.badge,
      labels: spec.labels,
      cursor: kept.cursor ?? options.cursor,
      window: kept.window ?? options.window,
      values: kept.values,
      theme: () => (theme ??= readTheme(root, spec)),
      onchange: remember,
    });
    panels.set(id, panel);
    cleanups.push(() => panel.dispose());
    return panel;
  };

  if (spec.type === "recorded") {
    const buffer = await inflate(model.get("columns"));
    const { caption, table, cursor, window } = spec;
    root.append(add("main", new RecordedSource(spec, buffer), { caption, table, cursor, window }).element);
  } else {
    for (const p of spec.panels) add(p.id, new ProgramSource(p), { title: p.title, caption: p.caption, cursor: p.cursor });
    const elements = [...panels.values()].map((p) => p.element);
    if (tabbed) root.append(tabs(spec.panels, elements, spec.switch));
    root.append(...elements);
  }

  // JupyterLab hides everything while its theme changes, until the next frame: what is drawn before has no width.
  const follow = () =>
    requestAnimationFrame(() => {
      theme = null;
      for (const panel of panels.values()) panel.invalidate();
    });
  const watcher = new MutationObserver(follow);
  watcher.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "data-jp-theme-light", "class"] });
  watcher.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme", "class"] });
  const media = matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", follow);
  const go = () => {
    const request = model.get("goto_request");
    if (!request?.serial || request.serial === followed) return;
    followed = request.serial;
    panels.get(request.panel ?? panels.keys().next().value)?.goto(request.time, request.width);
  };
  model.on("change:goto_request", go);
  go();
  cleanups.push(
    () => watcher.disconnect(),
    () => media.removeEventListener("change", follow),
    () => model.off("change:goto_request", go),
  );
}

function tabs(panels, elements, label = "Panel") {
  const select = (index, focus) => {
    buttons.forEach((b, i) => {
      b.setAttribute("aria-checked", String(i === index));
      b.tabIndex = i === index ? 0 : -1;
      elements[i].hidden = i !== index;
    });
    if (focus) buttons[index].focus();
  };
  const buttons = panels.map((panel, i) =>
    h("button", { type: "button", role: "radio", class: "hw-tab", onclick: () => select(i, false) }, panel.title || panel.id),
  );
  const move = (event) => {
    const at = buttons.indexOf(document.activeElement);
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (by === undefined || at < 0) return;
    event.preventDefault();
    select((at + by + buttons.length) % buttons.length, true);
  };
  select(0, false);
  return h("div", { class: "hw-tabs", role: "radiogroup", "aria-label": label ?? "Panel", onkeydown: move }, ...buttons);
}

export default { render };
