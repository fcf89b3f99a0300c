// Rows of boxes and curves -> draw calls on a surface. Knows nothing of programs, traces or the DOM.
//
// A row is {type: "lane", label, start, end, kind, name(i), tone?, dots?, slim?}, boxes sorted and not overlapping,
// or {type: "curve", label, curve: {t, before, after, stepped?}, colour, unit} or {type: "heading", label}.

const HEIGHT = { lane: 34, slim: 18, curve: 78, heading: 26 };
const GAP = 7;
const AXIS = 38;
const TAG = 24;

/** Place rows from top to bottom; returns pixel geometry. */
function layout(rows, width, top = 0) {
  // A slim row has one line for its label, others break it in two.
  const room = (row) => (row.type === "heading" ? 0 : row.slim ? Math.min(150, textWidth(row.label, 11)) : labelLines(row.label, 92).width);
  const gutter = width < 520 ? 88 : 24 + Math.max(70, ...rows.map(room));
  let y = top + TAG;
  const placed = rows.map((row) => {
    const height = row.slim ? HEIGHT.slim : HEIGHT[row.type];
    const place = { y, height };
    y += height + (row.slim ? 2 : GAP);
    return place;
  });
  const plotWidth = Math.max(40, width - gutter - 16);
  return { width, top, gutter, plotWidth, placed, bottom: y, height: y + AXIS - top };
}

function labelLines(label, room) {
  const words = label.split(" ");
  const lines = [""];
  for (const word of words) {
    const joined = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (lines.at(-1) && lines.length < 2 && textWidth(joined, 12) > room) lines.push(word);
    else lines[lines.length - 1] = joined;
  }
  return { lines, width: Math.min(126, Math.max(...lines.map((line) => textWidth(line, 12)))) };
}

const channel = (value) => {
  const c = value / 255;
  return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
};
const parse = (hex) => [1, 3, 5].map((i) => Number.parseInt(hex.slice(i, i + 2), 16));
const luminance = (hex) => {
  const [r, g, b] = parse(hex).map(channel);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
/** Mix two #rrggbb colours. */
function mix(a, b, share) {
  const [p, q] = [parse(a), parse(b)];
  return `#${p.map((v, i) => Math.round(v + (q[i] - v) * share).toString(16).padStart(2, "0")).join("")}`;
}
const readable = (fill) => (1.05 / (luminance(fill) + 0.05) > (luminance(fill) + 0.05) / 0.0565 ? "#ffffff" : "#101010");

const styles = new Map();
/** Fill, hatch, edge and ink of a kind of box in a theme. */
function boxStyle(theme, kind, tone) {
  const id = `${kind}|${tone ?? ""}|${theme.id}`;
  let style = styles.get(id);
  if (!style) {
    const base = theme.colours[kind] ?? theme.soft;
    const colour = tone ? mix(base, theme.dark ? "#000000" : "#ffffff", 0.42) : base;
    const pattern = theme.patterns[kind];
    const strong = theme.dark ? colour : mix(colour, "#000000", 0.22);
    style = pattern
      ? { fill: mix(theme.background, colour, 0.16), hatch: { kind: pattern, colour: strong }, stroke: strong, ink: theme.ink }
      : { fill: colour, ink: readable(colour), stroke: tone ? base : null };
    if (styles.size > 200) styles.clear();
    styles.set(id, style);
  }
  return style;
}

/** Text of a time or a value: "ns" is shown in the unit that suits it, any other unit with two decimals. */
function formatValue(value, unit, span = Math.abs(value)) {
  if (unit !== "ns") {
    const whole = Number.isInteger(value) && unit !== "" && /^(block|op|kernel|item|launch)/.test(unit);
    return `${whole ? value : value.toFixed(2)}${unit ? ` ${unit}` : ""}`;
  }
  const [scale, name] = nsScale(Math.max(Math.abs(value), 1));
  const finest = Math.max(0, Math.ceil(-Math.log10(Math.max(span, 1) / scale) + 3));
  return `${(value / scale).toFixed(scale === 1 ? 0 : Math.min(6, finest))} ${name}`;
}
const nsScale = (ns) => (ns >= 1e9 ? [1e9, "s"] : ns >= 1e6 ? [1e6, "ms"] : ns >= 1e3 ? [1e3, "µs"] : [1, "ns"]);

/** The next 1, 2 or 5 times a power of ten at or above a positive number. */
function niceStep(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  for (const m of [1, 2, 5]) if (m * power >= value * 0.999999) return m * power;
  return 10 * power;
}

/** Everything but the cursor; returns whether boxes narrower than a pixel were drawn as shares of time. */
function drawBase(surface, rows, geometry, view, theme) {
  const { gutter, plotWidth, placed, bottom, top } = geometry;
  const x = (t) => gutter + ((t - view.lo) / (view.hi - view.lo)) * plotWidth;
  const step = niceStep(((view.hi - view.lo) / plotWidth) * 90);
  const [scale, unitName] = view.unit === "ns" ? nsScale(Math.max(view.hi - view.lo, 1)) : [1, view.unit];
  const decimals = Math.max(0, Math.min(9, -Math.floor(Math.log10(step / scale) + 1e-9)));
  const first = Math.ceil(view.lo / step - 1e-9);
  for (let k = first; k * step <= view.hi * (1 + 1e-12); k++) {
    surface.line(x(k * step), top + TAG - 4, x(k * step), bottom, { stroke: theme.grid });
    surface.text(((k * step) / scale).toFixed(decimals), x(k * step), bottom + 11, { size: 11, colour: theme.soft, align: "center" });
  }
  surface.line(gutter, bottom, gutter + plotWidth, bottom, { stroke: theme.soft });
  surface.text(`time${unitName ? ` (${unitName})` : ""}`, gutter + plotWidth, bottom + 28, { size: 11, colour: theme.soft, align: "right" });
  let shared = false;
  rows.forEach((row, r) => {
    const place = placed[r];
    drawLabel(surface, row, place, gutter, theme);
    if (row.type === "heading") return;
    surface.clip(gutter - 1, place.y - 3, plotWidth + 2, place.height + 6);
    if (row.type === "lane") shared = drawLane(surface, row, place, geometry, view, theme) || shared;
    else drawCurve(surface, row, place, geometry, view, theme);
    surface.unclip();
    if (row.type === "curve") {
      const peak = curvePeak(row, view);
      const label = row.unit === "ns" ? formatValue(peak, "ns").replace(/\.0+ /, " ") : String(+peak.toPrecision(3));
      surface.text(label, gutter - 8, place.y + 6, { size: 10, colour: theme.soft, align: "right" });
      surface.text("0", gutter - 8, place.y + place.height - 5, { size: 10, colour: theme.soft, align: "right" });
    }
  });
  for (const mark of placeMarks(rows, geometry, view)) {
    surface.dot(mark.x, mark.y, 8, { fill: theme.background, stroke: theme.ink });
    surface.text(mark.text, mark.x, mark.y + 0.5, { size: 11, weight: 700, colour: theme.ink, align: "center" });
  }
  return shared;
}

function drawLabel(surface, row, place, gutter, theme) {
  if (row.type === "heading") {
    surface.text(fit(row.label, 600, 13, 600), 8, place.y + 15, { size: 13, weight: 600, colour: theme.ink });
    return;
  }
  if (row.slim && !row.label) return;
  const size = row.slim ? 11 : 12;
  const { lines } = row.slim ? { lines: [row.label] } : labelLines(row.label, gutter - 16);
  const middle = place.y + place.height / 2;
  lines.forEach((line, i) =>
    surface.text(fit(line, gutter - 16, size), gutter - 10, middle + (i - (lines.length - 1) / 2) * 14, {
      size,
      colour: theme.ink,
      align: "right",
    }),
  );
}

function drawLane(surface, row, place, { gutter, plotWidth }, view, theme) {
  const perTime = plotWidth / (view.hi - view.lo);
  const from = Math.max(0, lastAtOrBefore(row.start, view.lo));
  const to = lastAtOrBefore(row.start, view.hi);
  const few = to - from < 2000;
  const [left, right] = [gutter - 40, gutter + plotWidth + 40];
  let shares = null;
  for (let i = from; i <= to; i++) {
    const x0 = gutter + (row.start[i] - view.lo) * perTime;
    const x1 = gutter + (row.end[i] - view.lo) * perTime;
    if (x1 < gutter) continue;
    if (few || x1 - x0 >= 1.5) {
      drawBox(surface, row, i, Math.max(x0, left), Math.min(x1, right), place, theme, [gutter, gutter + plotWidth]);
      continue;
    }
    shares ??= row.kinds.map(() => new Float32Array(Math.ceil(plotWidth) + 2));
    const columns = shares[row.kind[i]];
    const a = Math.max(0, x0 - gutter);
    for (let c = Math.floor(a); c < x1 - gutter; c++) columns[c] += Math.min(c + 1, x1 - gutter) - Math.max(c, a);
  }
  if (shares) drawShares(surface, row, shares, place, gutter, theme);
  return shares !== null;
}

function drawBox(surface, row, i, x0, x1, place, theme, [first, last]) {
  const width = x1 - x0;
  const kind = row.kinds[row.kind[i]];
  const style = boxStyle(theme, kind, row.tone?.[i]);
  const gap = style.hatch ? 0 : Math.min(1.5, width * 0.2);
  surface.rect(x0, place.y, width - gap, place.height, { ...style, radius: place.height > 24 ? 3 : 2 });
  if (kind === "sync_wait" && row.dots && width > 12) {
    const y = place.y + place.height - 6;
    surface.dot(x0 + 5, y, 3.5, { fill: theme.colours.sync_wait, stroke: "#ffffff" });
    surface.dot(x1 - 5, y, 3.5, { fill: "#101010", stroke: "#ffffff" });
  }
  // The label stands in the middle of the part that is in view.
  const [from, to] = [Math.max(x0, first), Math.min(x1 - gap, last)];
  if (to - from < 14 || place.height < 14 || kind === "idle") return;
  const size = place.height > 24 ? 12 : 11;
  const label = fit(row.name(i), to - from - 6, size);
  if (!label) return;
  const middle = (from + to) / 2;
  if (style.hatch) {
    const room = textWidth(label, size) + 6;
    surface.rect(middle - room / 2, place.y + place.height / 2 - 8, room, 16, { fill: theme.background, radius: 3, alpha: 0.86 });
  }
  surface.text(label, middle, place.y + place.height / 2 + 0.5, { size, colour: style.ink, align: "center" });
}

// Boxes narrower than a pixel: in each pixel column the height of a colour is its share of that column's time.
function drawShares(surface, row, shares, place, gutter, theme) {
  const levels = 16;
  const count = shares[0].length;
  const quantised = (c) => shares.map((s) => Math.round(Math.min(1, s[c]) * levels));
  let runStart = 0;
  let run = quantised(0);
  for (let c = 1; c <= count; c++) {
    const next = c < count ? quantised(c) : null;
    if (next && next.every((v, k) => v === run[k])) continue;
    let y = place.y + place.height;
    run.forEach((level, k) => {
      if (!level) return;
      const height = Math.min((place.height * level) / levels, y - place.y);
      const { fill, hatch } = boxStyle(theme, row.kinds[k]);
      y -= height;
      surface.rect(gutter + runStart, y, c - runStart, height, { fill, hatch });
    });
    runStart = c;
    run = next;
  }
}

function curvePeak(row, view) {
  const { t, before, after } = row.curve;
  if (row.peak !== undefined && row.peakOf === row.curve && row.peakLo === view.lo && row.peakHi === view.hi) return row.peak;
  let peak = 0;
  for (let i = Math.max(0, lastAtOrBefore(t, view.lo)); i < t.length && t[i] <= view.hi; i++)
    peak = Math.max(peak, before[i], after[i]);
  Object.assign(row, { peak: peak > 0 ? niceCeiling(peak) : 1, peakOf: row.curve, peakLo: view.lo, peakHi: view.hi });
  return row.peak;
}

/** Round up to two significant digits that read well on an axis. */
function niceCeiling(value) {
  const step = niceStep(value / 10);
  return Math.ceil(value / step - 1e-9) * step;
}

const curveY = (value, peak, place) => place.y + place.height - 2 - (value / peak) * (place.height - 8);

function drawCurve(surface, row, place, { gutter, plotWidth }, view, theme) {
  const { t, before, after } = row.curve;
  const perTime = plotWidth / (view.hi - view.lo);
  const peak = curvePeak(row, view);
  const x = (time) => gutter + (time - view.lo) * perTime;
  const y = (value) => curveY(value, peak, place);
  const colour = theme.colours[row.colour] ?? theme.ink;
  const base = y(0);
  surface.line(gutter, base, gutter + plotWidth, base, { stroke: theme.grid });
  const from = Math.max(0, lastAtOrBefore(t, view.lo));
  const to = lastAtOrBefore(t, view.hi);
  if (to < from) return;
  if (to - from <= 3 * plotWidth) {
    const points = [];
    const begin = Math.max(view.lo, t[0]);
    points.push(x(begin), y(curveAt(row.curve, begin)));
    for (let i = from; i <= to; i++) if (t[i] >= begin) points.push(x(t[i]), y(before[i]), x(t[i]), y(after[i]));
    const end = Math.min(view.hi, t[t.length - 1]);
    points.push(x(end), y(curveAt(row.curve, end)));
    surface.path([points[0], base, ...points, points.at(-2), base], { fill: colour, alpha: 0.2 });
    surface.path(points, { stroke: colour, width: 2 });
    return;
  }
  const high = new Float64Array(Math.ceil(plotWidth) + 1).fill(-1);
  const low = new Float64Array(high.length).fill(Infinity);
  for (let i = from; i <= to; i++) {
    const c = Math.max(0, Math.min(high.length - 1, Math.floor((t[i] - view.lo) * perTime)));
    high[c] = Math.max(high[c], before[i], after[i]);
    low[c] = Math.min(low[c], before[i], after[i]);
  }
  const over = [];
  const under = [];
  for (let c = 0; c < high.length; c++) {
    if (high[c] < 0) continue;
    over.push(gutter + c + 0.5, y(high[c]));
    under.unshift(gutter + c + 0.5, y(low[c]));
  }
  surface.path([over[0], base, ...over, over.at(-2), base], { fill: colour, alpha: 0.2 });
  surface.path([...over, ...under], { fill: colour, alpha: 0.75 });
  surface.path(over, { stroke: colour, width: 1 });
}

function placeMarks(rows, { gutter, plotWidth, placed }, view) {
  const marks = [];
  rows.forEach((row, r) => {
    let last = -Infinity;
    for (const { time, text } of [...(row.marks ?? [])].sort((a, b) => a.time - b.time)) {
      if (time < view.lo || time > view.hi) continue;
      const x = Math.max(gutter + ((time - view.lo) / (view.hi - view.lo)) * plotWidth, last + 18);
      last = x;
      marks.push({ x, y: placed[r].y - 1, text });
    }
  });
  return marks;
}

/** The cursor line, its time tag and a dot on every curve. */
function drawCursor(surface, rows, geometry, view, time, theme) {
  const { gutter, plotWidth, placed, top, bottom } = geometry;
  if (time < view.lo || time > view.hi) return;
  const x = gutter + ((time - view.lo) / (view.hi - view.lo)) * plotWidth;
  surface.line(x, top + TAG - 6, x, bottom, { stroke: theme.ink, width: 1.5 });
  rows.forEach((row, r) => {
    if (row.type !== "curve" || !row.curve.t.length) return;
    const y = curveY(curveAt(row.curve, time), curvePeak(row, view), placed[r]);
    surface.dot(x, y, 4.5, { fill: theme.colours[row.colour] ?? theme.ink, stroke: theme.background });
  });
  const label = formatValue(time, view.unit === "ns" ? "ns" : "", view.hi - view.lo);
  const width = textWidth(label, 11, 600) + 12;
  const left = Math.min(Math.max(x - width / 2, gutter - 8), gutter + plotWidth + 12 - width);
  surface.rect(left, top + 1, width, 17, { fill: theme.ink, radius: 4 });
  surface.text(label, left + width / 2, top + 10, { size: 11, weight: 600, colour: theme.background, align: "center" });
}

/** Title, subtitle and legend of an exported picture; returns the height used. */
function drawHeader(surface, width, title, badge, legend, theme) {
  let y = 18;
  if (title) {
    surface.text(fit(title, width - 24, 15, 600), 12, y, { size: 15, weight: 600, colour: theme.ink });
    y += 20;
  }
  if (badge) {
    surface.text(fit(badge, width - 24, 11), 12, y, { size: 11, colour: theme.soft });
    y += 20;
  }
  let x = 12;
  for (const { kind, label } of legend) {
    const room = textWidth(label, 11) + 40;
    if (x + room > width && x > 12) [x, y] = [12, y + 18];
    drawSwatch(surface, x, y - 6, kind, theme);
    surface.text(label, x + 22, y, { size: 11, colour: theme.ink });
    x += room;
  }
  return y + 14;
}

/** A legend's swatch, 16 x 12 pixels. */
function drawSwatch(surface, x, y, kind, theme) {
  if (theme.curveKinds.has(kind)) {
    surface.path([x, y + 9, x + 5, y + 3, x + 11, y + 7, x + 16, y + 2], { stroke: theme.colours[kind], width: 2 });
    return;
  }
  surface.rect(x, y, 16, 12, { ...boxStyle(theme, kind), radius: 2 });
}
