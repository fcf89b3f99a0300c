// Two drawing surfaces with the same calls: the screen's canvas and an SVG text for export.
// Strings reach them only through fillText and escaped text nodes.

const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";

const measuring = document.createElement("canvas").getContext("2d");
const widths = new Map();

/** Width in CSS pixels of a string at a font size. */
function textWidth(text, size, weight = 400) {
  const id = `${size}|${weight}|${text}`;
  let width = widths.get(id);
  if (width === undefined) {
    if (widths.size > 20000) widths.clear();
    measuring.font = `${weight} ${size}px ${FONT}`;
    width = measuring.measureText(text).width;
    widths.set(id, width);
  }
  return width;
}

/** The longest prefix with an ellipsis that fits, "" where not even one letter does. */
function fit(text, room, size, weight = 400) {
  // Long names are cut first: measuring megabytes of hostile text would stall the page.
  const whole = text.length > 300 ? `${text.slice(0, 300)}…` : text;
  if (textWidth(whole, size, weight) <= room) return whole;
  const letters = Array.from(whole);
  let [lo, hi] = [0, letters.length - 1];
  while (lo < hi) {
    const mid = (lo + hi + 1) >> 1;
    if (textWidth(`${letters.slice(0, mid).join("")}…`, size, weight) <= room) lo = mid;
    else hi = mid - 1;
  }
  return lo > 0 ? `${letters.slice(0, lo).join("")}…` : "";
}

const HATCH = 8;
const hatchLines = { slash: [[-2, 2, 2, -2], [-2, 10, 10, -2], [6, 10, 10, 6]] };
hatchLines.cross = [...hatchLines.slash, [-2, 6, 2, 10], [-2, -2, 10, 10], [6, -2, 10, 2]];

class CanvasSurface {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.hatches = new Map();
  }

  begin(width, height, background = null, scale = window.devicePixelRatio || 1) {
    const [w, h] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w;
      this.canvas.height = h;
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    if (scale !== this.scale) this.hatches.clear();
    this.scale = scale;
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.context.clearRect(0, 0, width, height);
    if (background) this.rect(0, 0, width, height, { fill: background });
  }

  snap(value) {
    return Math.round(value * this.scale) / this.scale;
  }

  hatch(kind, colour) {
    const id = `${kind}|${colour}`;
    if (!this.hatches.has(id)) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = Math.round(HATCH * this.scale);
      const pen = tile.getContext("2d");
      const scale = tile.width / HATCH;
      pen.scale(scale, scale);
      pen.strokeStyle = colour;
      pen.lineWidth = 1.3;
      for (const [x1, y1, x2, y2] of hatchLines[kind]) {
        pen.beginPath();
        pen.moveTo(x1, y1);
        pen.lineTo(x2, y2);
        pen.stroke();
      }
      const pattern = this.context.createPattern(tile, "repeat");
      pattern.setTransform(new DOMMatrix().scale(1 / scale));
      this.hatches.set(id, pattern);
    }
    return this.hatches.get(id);
  }

  rect(x, y, width, height, { fill, hatch, stroke, radius = 0, alpha = 1 } = {}) {
    const pen = this.context;
    const [left, top] = [this.snap(x), this.snap(y)];
    const w = Math.max(this.snap(x + width) - left, 1 / this.scale);
    const h = Math.max(this.snap(y + height) - top, 1 / this.scale);
    pen.globalAlpha = alpha;
    pen.beginPath();
    if (radius && w > 2 * radius) pen.roundRect(left, top, w, h, radius);
    else pen.rect(left, top, w, h);
    if (fill) {
      pen.fillStyle = fill;
      pen.fill();
    }
    if (hatch) {
      pen.fillStyle = this.hatch(hatch.kind, hatch.colour);
      pen.fill();
    }
    pen.globalAlpha = 1;
    if (stroke && w > 2) {
      pen.beginPath();
      pen.roundRect(left + 0.5, top + 0.5, w - 1, h - 1, radius && w > 2 * radius ? radius - 0.5 : 0);
      pen.strokeStyle = stroke;
      pen.lineWidth = 1;
      pen.stroke();
    }
  }

  line(x1, y1, x2, y2, { stroke, width = 1, dash = [] } = {}) {
    const pen = this.context;
    const half = width % 2 ? 0.5 : 0;
    const vertical = x1 === x2;
    const horizontal = y1 === y2;
    pen.beginPath();
    pen.setLineDash(dash);
    pen.moveTo(vertical ? Math.floor(x1) + half : x1, horizontal ? Math.floor(y1) + half : y1);
    pen.lineTo(vertical ? Math.floor(x2) + half : x2, horizontal ? Math.floor(y2) + half : y2);
    pen.strokeStyle = stroke;
    pen.lineWidth = width;
    pen.stroke();
    pen.setLineDash([]);
  }

  path(points, { stroke, fill, width = 1.5, alpha = 1 } = {}) {
    const pen = this.context;
    pen.beginPath();
    for (let i = 0; i < points.length; i += 2) pen.lineTo(points[i], points[i + 1]);
    if (fill) {
      pen.globalAlpha = alpha;
      pen.fillStyle = fill;
      pen.fill();
      pen.globalAlpha = 1;
    }
    if (stroke) {
      pen.strokeStyle = stroke;
      pen.lineWidth = width;
      pen.lineJoin = "round";
      pen.stroke();
    }
  }

  dot(x, y, radius, { fill, stroke }) {
    const pen = this.context;
    pen.beginPath();
    pen.arc(x, y, radius, 0, 2 * Math.PI);
    pen.fillStyle = fill;
    pen.fill();
    if (stroke) {
      pen.strokeStyle = stroke;
      pen.lineWidth = 1.5;
      pen.stroke();
    }
  }

  text(text, x, y, { size = 12, weight = 400, colour, align = "left" } = {}) {
    const pen = this.context;
    pen.font = `${weight} ${size}px ${FONT}`;
    pen.textAlign = align;
    pen.textBaseline = "middle";
    pen.fillStyle = colour;
    pen.fillText(text, x, y);
  }

  clip(x, y, width, height) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this.context.clip();
  }

  unclip() {
    this.context.restore();
  }
}

// XML 1.0 has no form for most control characters; a viewer rejects the whole file.
const escapeXml = (text) =>
  text
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd")
    .replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const n = (value) => String(Math.round(value * 100) / 100);

class SvgSurface {
  begin(width, height, background) {
    this.width = width;
    this.height = height;
    this.parts = [];
    this.defs = [];
    this.hatches = new Map();
    this.clips = 0;
    if (background) this.rect(0, 0, width, height, { fill: background });
  }

  hatch(kind, colour) {
    const id = `${kind}|${colour}`;
    if (!this.hatches.has(id)) {
      const name = `hatch${this.hatches.size}`;
      const lines = hatchLines[kind].map(([a, b, c, d]) => `M${a} ${b}L${c} ${d}`).join("");
      this.defs.push(
        `<pattern id="${name}" width="${HATCH}" height="${HATCH}" patternUnits="userSpaceOnUse">` +
          `<path d="${lines}" stroke="${escapeXml(colour)}" stroke-width="1.3"/></pattern>`,
      );
      this.hatches.set(id, name);
    }
    return this.hatches.get(id);
  }

  rect(x, y, width, height, { fill, hatch, stroke, radius = 0, alpha = 1 } = {}) {
    const place = `x="${n(x)}" y="${n(y)}" width="${n(Math.max(width, 0.25))}" height="${n(height)}"${radius ? ` rx="${radius}"` : ""}`;
    const opacity = alpha < 1 ? ` fill-opacity="${n(alpha)}"` : "";
    const edge = stroke ? ` stroke="${escapeXml(stroke)}"` : "";
    if (fill) this.parts.push(`<rect ${place} fill="${escapeXml(fill)}"${opacity}${hatch ? "" : edge}/>`);
    if (hatch) this.parts.push(`<rect ${place} fill="url(#${this.hatch(hatch.kind, hatch.colour)})"${opacity}${edge}/>`);
    if (stroke && !fill && !hatch) this.parts.push(`<rect ${place} fill="none"${edge}/>`);
  }

  line(x1, y1, x2, y2, { stroke, width = 1, dash = [] } = {}) {
    const dashes = dash.length ? ` stroke-dasharray="${dash.join(" ")}"` : "";
    this.parts.push(
      `<line x1="${n(x1)}" y1="${n(y1)}" x2="${n(x2)}" y2="${n(y2)}" stroke="${escapeXml(stroke)}" stroke-width="${width}"${dashes}/>`,
    );
  }

  path(points, { stroke, fill, width = 1.5, alpha = 1 } = {}) {
    const steps = [];
    for (let i = 0; i < points.length; i += 2) steps.push(`${n(points[i])} ${n(points[i + 1])}`);
    if (!steps.length) return;
    const d = `d="M${steps.join("L")}"`;
    if (fill) this.parts.push(`<path ${d} fill="${escapeXml(fill)}" fill-opacity="${n(alpha)}"/>`);
    if (stroke)
      this.parts.push(
        `<path ${d} fill="none" stroke="${escapeXml(stroke)}" stroke-width="${width}" stroke-linejoin="round"/>`,
      );
  }

  dot(x, y, radius, { fill, stroke }) {
    const edge = stroke ? ` stroke="${escapeXml(stroke)}" stroke-width="1.5"` : "";
    this.parts.push(`<circle cx="${n(x)}" cy="${n(y)}" r="${radius}" fill="${escapeXml(fill)}"${edge}/>`);
  }

  text(text, x, y, { size = 12, weight = 400, colour, align = "left" } = {}) {
    const anchor = { left: "start", center: "middle", right: "end" }[align];
    this.parts.push(
      `<text x="${n(x)}" y="${n(y)}" font-size="${size}" font-weight="${weight}" fill="${escapeXml(colour)}" ` +
        `text-anchor="${anchor}" dominant-baseline="central">${escapeXml(text)}</text>`,
    );
  }

  clip(x, y, width, height) {
    const name = `clip${this.clips++}`;
    this.defs.push(
      `<clipPath id="${name}"><rect x="${n(x)}" y="${n(y)}" width="${n(width)}" height="${n(height)}"/></clipPath>`,
    );
    this.parts.push(`<g clip-path="url(#${name})">`);
  }

  unclip() {
    this.parts.push("</g>");
  }

  finish() {
    return (
      `<svg xmlns="http://www.w3.org/2000/svg" width="${n(this.width)}" height="${n(this.height)}" ` +
      `viewBox="0 0 ${n(this.width)} ${n(this.height)}" font-family="${escapeXml(FONT)}">` +
      `<defs>${this.defs.join("")}</defs>${this.parts.join("")}</svg>`
    );
  }
}
