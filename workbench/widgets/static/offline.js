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
// A figure's mid grey serves any page; this page knows its own ink, and error bars would stay near black.
function drawFigure(place) {
  const { data, layout, frames } = structuredClone(page.figures[place.dataset.figure]);
  const ink = getComputedStyle(document.body).color;
  const template = ((layout.template ??= {}).layout ??= {});
  template.font = { ...template.font, color: ink };
  const bars = { error_x: { color: ink }, error_y: { color: ink } };
  layout.template.data = { bar: [bars], scatter: [bars], ...layout.template.data };
  place.replaceChildren();
  Plotly.newPlot(place, { data, layout, frames, config: { responsive: true, displaylogo: false } });
}

const figures = document.querySelectorAll("[data-figure]");
figures.forEach(drawFigure);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => figures.forEach(drawFigure));

const toggle = document.getElementById("show-code");
toggle.addEventListener("click", () => {
  const show = toggle.getAttribute("aria-pressed") !== "true";
  toggle.setAttribute("aria-pressed", String(show));
  for (const details of document.querySelectorAll("details.code")) details.open = show;
});
