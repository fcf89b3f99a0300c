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

/** A text in lines of at most `most` characters, cut after spaces and brackets. */
function lines(text, most) {
  const found = [""];
  for (const word of text.split(/(?<= )|(?<=\()/)) {
    if (found.at(-1) && (found.at(-1) + word).trimEnd().length > most) found.push("");
    found[found.length - 1] += word;
  }
  return found.map((line) => line.trimEnd());
}

/** A figure's text in lines of at most `room` px, about equally long; its own line breaks stay. */
function wrap(text, room, size) {
  const parts = text.split(/<br *\/?>/).flatMap((part) => {
    let most = Math.max(12, Math.floor(room / (size * 0.54)));
    const count = lines(part, most).length;
    while (most > 12 && count > 1 && lines(part, most - 1).length === count) most -= 1;
    return lines(part, most);
  });
  return parts.join("<br>");
}

/** The title and the badge of a figure that scrolls: whole within the part that is in view. */
async function fitTitles(place) {
  const { title, margin, height } = place._fullLayout;
  const before = titlesHeight(place);
  await Plotly.relayout(place, titles(place._fullLayout, place.parentElement.clientWidth));
  const more = titlesHeight(place) - before;
  if (title.text && more > 0) await Plotly.relayout(place, { "margin.t": margin.t + more, height: height + more });
}

const heightOf = (place, selector) => place.querySelector(selector)?.getBBox().height ?? 0;
const titlesHeight = (place) => heightOf(place, ".gtitle") + heightOf(place, ".gtitle-subtitle");

function titles({ title }, width) {
  const change = { "title.xref": "container", "title.x": 0 };
  for (const [key, { text, font }] of [["title", title], ["title.subtitle", title.subtitle]])
    if (text) change[`${key}.text`] = wrap(text, width - 16, font.size);
  if (change["title.text"]?.includes("<br>")) change["title.pad.t"] = 20;
  return change;
}

/** On a phone: titles in lines, from the page's edge, and room for them and for the legend's rows, above or below. */
async function fitNarrow(place) {
  const full = place._fullLayout;
  const { width } = full;
  const change = titles(full, width);
  const below = full.legend && full.legend.y < (full.legend.yref === "container" ? 0.5 : 0);
  const corner = { orientation: "h", xref: "container", x: 0, xanchor: "left", yref: "container" };
  const legend = below ? { ...corner, y: 0, yanchor: "bottom" } : { ...corner, y: 1, yanchor: "top" };
  for (const [key, value] of Object.entries(legend)) change[`legend.${key}`] = value;
  let panels = full._size.h;
  for (const [name, axis] of Object.entries(full)) {
    if (!/^yaxis\d*$/.test(name)) continue;
    if (place.layout[name]?.title?.text) {
      const { text, font } = axis.title;
      change[`${name}.title.text`] = wrap(text, axis._length + 30, font.size);
    }
    if (axis.type !== "category" || axis.tickmode === "array") continue;
    const labels = axis._categories.map((label) => wrap(label, 0.36 * width, 11));
    Object.assign(change, { [`${name}.tickvals`]: [...axis._categories], [`${name}.ticktext`]: labels });
    change[`${name}.tickfont.size`] = 11;
    const [least, most] = axis.domain;
    const rows = labels.length * Math.max(...labels.map((label) => label.split("<br>").length));
    panels = Math.max(panels, (15 * rows) / (most - least));
  }
  await Plotly.relayout(place, change);
  if (await fitHeadings(place)) panels *= 1.25; // the gap above a panel grows with the figure
  const now = place._fullLayout;
  const edge = place.querySelector(".main-svg").getBoundingClientRect().top + now._size.t;
  const headings = Array.from(place.querySelectorAll(`.annotation-text, ${X_TEXTS}`), (e) => e.getBoundingClientRect());
  const headed = Math.max(0, ...headings.filter((box) => box.bottom < edge + 4).map((box) => edge - box.top));
  const titled = 24 + titlesHeight(place);
  const key = heightOf(place, ".legend");
  const top = Math.max(now.margin.t, titled + headed + (below ? 0 : key));
  const bottom = reach(place) + 10 + (below ? key + 4 : 0);
  const height = top + panels + bottom;
  const room = { "margin.t": top, "margin.b": bottom, height };
  if (!below) room["legend.y"] = 1 - titled / height;
  await Plotly.relayout(place, room);
}

/** Headings begin at the page's edge, where they have most room, x axes' titles at the panels'; whether panels crowd. */
async function fitHeadings(place) {
  const full = place._fullLayout;
  const change = {};
  let crowded = false; // a text between two panels takes more than one line
  for (const [name, axis] of Object.entries(place.layout))
    if (/^xaxis\d*$/.test(name)) {
      const { _length, _offset, _categories, type, title } = full[name];
      const middle = _offset + _length / 2;
      const room = 2 * Math.min(middle, full.width - middle) - 8;
      if (axis.title?.text) {
        const text = (change[`${name}.title.text`] = wrap(axis.title.text, room, title.font.size));
        const panel = full[full[name].anchor.replace("y", "yaxis")];
        crowded ||= text.includes("<br>") && panel?.domain[0] > 0.05;
      }
      if (type === "category" && _categories.join("").length * 7 > _length) change[`${name}.tickangle`] = -60;
    }
  (place.layout.annotations ?? []).forEach(({ text, showarrow, xref, x, xanchor }, i) => {
    if (showarrow || !/domain$|paper/.test(xref)) return;
    if (xanchor === "center") change[`annotations[${i}].text`] = wrap(text, full._size.w, full.annotations[i].font.size);
    if (x !== 0 || xanchor !== "left") return;
    change[`annotations[${i}].text`] = wrap(text, full.width - 16, 11);
    change[`annotations[${i}].font.size`] = 11;
    change[`annotations[${i}].xshift`] = -full._size.l;
    change[`annotations[${i}].align`] = "left";
    crowded ||= change[`annotations[${i}].text`].includes("<br>");
  });
  await Plotly.relayout(place, change);
  return crowded;
}

const X_TEXTS = "[class$=tick] text, [class^=g-x] text";

/** How far ticks and titles reach below the panels, px. */
function reach(place) {
  const texts = Array.from(place.querySelectorAll(X_TEXTS), (text) => text.getBoundingClientRect().bottom);
  const lowest = Math.max(0, ...texts);
  const { height, _size } = place._fullLayout;
  return Math.max(0, lowest - place.querySelector(".main-svg").getBoundingClientRect().top - height + _size.b);
}

const DARK = "(prefers-color-scheme: dark)";

// Labels that plotly shrinks to fit narrow bars, below what anybody reads; the hover text has them.
function hideSpecks(place) {
  for (const text of place.querySelectorAll(".bartext")) {
    const scale = /scale\(([\d.e-]+)/.exec(text.getAttribute("transform"))?.[1] ?? 1;
    text.style.visibility = scale * parseFloat(getComputedStyle(text).fontSize) < 7 ? "hidden" : "";
  }
}

// In a notebook a figure stands on white; here on the page, in the page's ink, and its words in the colours they have on
// such a page. Error bars would stay near black.
async function drawFigure(place) {
  const twins = matchMedia(DARK).matches ? page.dark : {};
  const text = JSON.stringify(page.figures[place.dataset.figure]);
  const { data, layout, frames } = JSON.parse(text.replace(/#[0-9a-f]{6}/gi, (hex) => twins[hex.toUpperCase()] ?? hex));
  const ink = getComputedStyle(document.body).color;
  layout.paper_bgcolor = "rgba(0,0,0,0)";
  const template = ((layout.template ??= {}).layout ??= {});
  template.font = { ...template.font, color: ink };
  const bars = { error_x: { color: ink }, error_y: { color: ink } };
  layout.template.data = { bar: [bars], scatter: [bars], ...layout.template.data };
  place.replaceChildren();
  await Plotly.newPlot(place, { data, layout, frames, config: { responsive: true, displaylogo: false } });
  place.on("plotly_afterplot", () => hideSpecks(place));
  hideSpecks(place);
  if (place.clientWidth < NARROW) await fitNarrow(place);
  else if (place.parentElement.clientWidth < NARROW) await fitTitles(place);
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
