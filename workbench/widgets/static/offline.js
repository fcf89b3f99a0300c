// Makes an exported notebook live without a kernel or a network: plotly figures from the file beside the page, our own
// widgets from their saved state through the smallest model that an anywidget front-end needs.

function bytes(base64) {
  const text = atob(base64);
  const array = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) array[i] = text.charCodeAt(i);
  return new DataView(array.buffer);
}

class StaticModel {
  constructor({ state, buffers }) {
    this.state = state;
    for (const { path, data } of buffers) {
      let target = this.state;
      for (const part of path.slice(0, -1)) target = target[part];
      target[path.at(-1)] = bytes(data);
    }
    this.listeners = new Map();
    this.send = () => {};
    this.widget_manager = null;
  }

  get(name) {
    return this.state[name];
  }

  set(name, value) {
    this.state[name] = value;
    for (const listener of this.listeners.get(`change:${name}`) ?? []) listener();
  }

  save_changes() {}

  on(name, listener) {
    if (!this.listeners.has(name)) this.listeners.set(name, new Set());
    this.listeners.get(name).add(listener);
  }

  off(name, listener) {
    if (listener) this.listeners.get(name)?.delete(listener);
    else this.listeners.delete(name);
  }
}

const page = JSON.parse(document.getElementById("page-state").textContent);
const modules = new Map();
function load(id) {
  if (!modules.has(id)) {
    const url = URL.createObjectURL(new Blob([page.scripts[id]], { type: "text/javascript" }));
    modules.set(id, import(url));
  }
  return modules.get(id);
}

async function showWidget(place) {
  const saved = page.models[place.dataset.model];
  try {
    const { default: found } = await load(saved.script);
    const widget = typeof found === "function" ? await found() : found;
    const model = new StaticModel(saved);
    await widget.initialize?.({ model });
    place.replaceChildren();
    await widget.render?.({ model, el: place });
  } catch (error) {
    place.textContent = `This view cannot be shown: ${error.message}`;
  }
}

for (const place of document.querySelectorAll("[data-model]")) showWidget(place);
const NARROW = 640;

/** A figure's text in lines of at most `room` px; its own line breaks stay. */
function wrap(text, room, size) {
  const most = Math.max(12, Math.floor(room / (size * 0.54)));
  const lines = [];
  for (const part of text.split(/<br *\/?>/)) {
    let line = "";
    for (const word of part.split(" ")) {
      if (line && line.length + 1 + word.length > most) lines.push(line), (line = word);
      else line = line ? `${line} ${word}` : word;
    }
    lines.push(line);
  }
  return lines.join("<br>");
}

/** On a phone: titles in lines, from the page's edge, and room above the panels for them and the legend's rows. */
async function fitNarrow(place) {
  const full = place._fullLayout;
  const { width } = full;
  const change = { "title.xref": "container", "title.x": 0 };
  for (const key of ["title", "title.subtitle"]) {
    const title = key === "title" ? full.title : full.title.subtitle;
    if (title?.text) change[`${key}.text`] = wrap(title.text, width - 16, title.font.size);
  }
  for (const [name, { title }] of Object.entries(place.layout))
    if (/^[xy]axis\d*$/.test(name) && title?.text)
      change[`${name}.title.text`] = wrap(title.text, full[name]._length + 30, full[name].title.font.size);
  (place.layout.annotations ?? []).forEach(({ text, showarrow, xref, x, xanchor }, i) => {
    // The heading of a panel begins at the page's edge, where it has most room.
    if (showarrow || !/domain$|paper/.test(xref) || x !== 0 || xanchor !== "left") return;
    change[`annotations[${i}].text`] = wrap(text, width - 16, 11);
    change[`annotations[${i}].font.size`] = 11;
    change[`annotations[${i}].xshift`] = -full._size.l;
    change[`annotations[${i}].align`] = "left";
    const lines = change[`annotations[${i}].text`].split("<br>").length;
    if (lines < 2) return;
    change.height = full.height * 1.25; // the gap above a panel grows with the figure
    if (full.legend) change["legend.y"] = full.legend.y + (24 * (lines - 1)) / full._size.h;
  });
  await Plotly.relayout(place, change);
  const now = place._fullLayout;
  const heightOf = (selector) => place.querySelector(selector)?.getBBox().height ?? 0;
  const above = Math.max(0, (now.legend?.y ?? 1) - 1) * now._size.h;
  const needed = 24 + heightOf(".gtitle") + heightOf(".gtitle-subtitle") + heightOf(".legend") + above;
  const more = needed - now.margin.t;
  if (more > 0) await Plotly.relayout(place, { "margin.t": needed, height: now.height + more });
}

const DARK = "(prefers-color-scheme: dark)";

// A figure's mid grey serves any page; this page knows its own ink, and error bars would stay near black.
async function drawFigure(place) {
  const figure = structuredClone(page.figures[place.dataset.figure]);
  const { data, layout, frames, themes } = figure;
  for (const [path, colour] of themes[matchMedia(DARK).matches ? "dark" : "light"])
    path.slice(0, -1).reduce((node, part) => node[part], figure)[path.at(-1)] = colour;
  const ink = getComputedStyle(document.body).color;
  const template = ((layout.template ??= {}).layout ??= {});
  template.font = { ...template.font, color: ink };
  const bars = { error_x: { color: ink }, error_y: { color: ink } };
  layout.template.data = { bar: [bars], scatter: [bars], ...layout.template.data };
  place.replaceChildren();
  await Plotly.newPlot(place, { data, layout, frames, config: { responsive: true, displaylogo: false } });
  if (place.clientWidth < NARROW) await fitNarrow(place);
}

const figures = document.querySelectorAll("[data-figure]");
figures.forEach(drawFigure);
for (const query of [DARK, `(max-width: ${NARROW}px)`])
  matchMedia(query).addEventListener("change", () => figures.forEach(drawFigure));

const toggle = document.getElementById("show-code");
toggle.addEventListener("click", () => {
  const show = toggle.getAttribute("aria-pressed") !== "true";
  toggle.setAttribute("aria-pressed", String(show));
  for (const details of document.querySelectorAll("details.code")) details.open = show;
});
