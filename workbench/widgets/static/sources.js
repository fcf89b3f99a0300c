// What a panel shows: a program that is simulated again at every change, or recorded columns.
// Both give rows for picture.js, the extent of time, the boundaries to step through, and readouts.

const STEP_KINDS = { submit: "cpu_submit", work: "host_work", wait: "sync_wait", record: "host_work", stream_wait: "host_work" };
const KINDS = ["cpu_submit", "host_work", "sync_wait", "gpu_execute", "idle"];
const KIND_INDEX = Object.fromEntries(KINDS.map((kind, i) => [kind, i]));
const CURVES = { queued_blocks: queuedBlocksCurve, blocks_ahead: blocksAheadCurve };

/** The object and the key that a path in a program ends at. */
function resolve(program, path) {
  let target = program;
  for (const part of path.slice(0, -1)) target = target?.[part];
  const key = path.at(-1);
  if (target === null || typeof target !== "object" || !Object.hasOwn(target, key))
    throw new Error(`control: the program has no ${path.join(".")}`);
  return { target, key };
}

// Curves are asked for by the picture and again by every scrub: computed once for each simulation.
const curves = new WeakMap();
function curveOf(sim, name, device = 0) {
  if (!curves.has(sim)) curves.set(sim, new Map());
  const known = curves.get(sim);
  const id = `${name}${device}`;
  if (!known.has(id)) known.set(id, name === "headroom" ? deviceCurve(sim, device) : CURVES[name](sim));
  return known.get(id);
}

// Parallel arrays, filled in order of time: ten thousand small objects and a sort would cost most of a redraw.
class Boxes {
  constructor() {
    Object.assign(this, { start: [], end: [], kind: [], names: [], tone: [] });
  }

  add(start, end, kind, name, tone) {
    if (end <= start) return;
    this.start.push(start);
    this.end.push(end);
    this.kind.push(KIND_INDEX[kind]);
    this.names.push(name);
    this.tone.push(tone);
  }

  row(label) {
    const { names, tone } = this;
    return {
      type: "lane",
      label,
      kinds: KINDS,
      start: Float64Array.from(this.start),
      end: Float64Array.from(this.end),
      kind: Uint8Array.from(this.kind),
      name: (i) => names[i],
      tone,
      dots: true,
    };
  }
}

class ProgramSource {
  constructor(panel) {
    this.panel = panel;
    this.controls = panel.controls ?? [];
    this.programs = new Map(panel.timelines.map((t) => [t.id, structuredClone(t.program)]));
    this.unit = panel.timelines[0]?.program.time_unit ?? "";
    this.writes = this.controls.flatMap((control) =>
      control.sets.map((set) => ({ control: control.id, set, ...resolve(this.program(set.timeline), set.path) })),
    );
    this.sims = new Map();
    this.extent = [0, 0];
    // The scale of the report's own setting is kept, so that a slider moves boxes and not the ruler.
    this.update(Object.fromEntries(this.controls.map((c) => [c.id, c.report ?? c.value])));
    this.home = this.extent[1];
  }

  update(values) {
    for (const { control, set, target, key } of this.writes) {
      const value = values[control];
      target[key] = set.if_positive === undefined ? value * (set.scale ?? 1) + (set.offset ?? 0) : value > 0 ? set.if_positive : 0;
    }
    let last = 0;
    for (const [id, program] of this.programs) {
      const sim = simulate(program);
      this.sims.set(id, sim);
      last = Math.max(last, sim.makespan);
    }
    this.extent = [0, Math.max(this.home ?? 0, last > 0 ? niceCeiling(last) : 1)];
    this.rows = this.panel.timelines.flatMap((t) => this.timelineRows(t));
  }

  program(id) {
    return this.programs.get(id) ?? this.missing(id);
  }

  sim(id) {
    return this.sims.get(id ?? this.panel.timelines[0].id) ?? this.missing(id);
  }

  missing(id) {
    throw new Error(`panel ${this.panel.id}: no timeline is called ${id}; it has ${[...this.programs.keys()].join(", ")}`);
  }

  timelineRows(timeline) {
    const sim = this.sims.get(timeline.id);
    const rows = timeline.rows.map((row) => (row.type === "lane" ? this.laneRow(sim, row) : this.curveRow(sim, row)));
    for (const mark of timeline.marks ?? []) {
      const { step, op } = mark.anchor;
      const [from, to] = step === undefined ? [sim.start, sim.end] : [sim.hostStart, sim.hostEnd];
      (rows[mark.row].marks ??= []).push({ time: (mark.edge === "end" ? to : from)[step ?? op], text: String(mark.text) });
    }
    return timeline.title ? [{ type: "heading", label: timeline.title }, ...rows] : rows;
  }

  laneRow(sim, row) {
    const boxes = new Boxes();
    if (row.lane.startsWith("cpu")) {
      for (const i of sim.threads.get(Number(row.lane.slice(3))) ?? []) {
        const step = sim.steps[i];
        const kind = STEP_KINDS[step.kind];
        if (kind) boxes.add(sim.hostStart[i], sim.hostEnd[i], kind, step.label ?? step.event ?? "", step.tone);
      }
      return boxes.row(row.label);
    }
    const device = Number(row.lane.slice(3).split("/")[0]);
    const span = activeSpan(sim, device);
    const idle = span ? idleIntervals(sim, device, ...span) : [];
    let gap = 0;
    const idleBefore = (time) => {
      for (; gap < idle.length && idle[gap][0] < time; gap++) boxes.add(...idle[gap], "idle", "idle");
    };
    for (const j of sim.lanes.get(row.lane) ?? []) {
      idleBefore(sim.start[j]);
      boxes.add(sim.start[j], sim.end[j], "gpu_execute", sim.ops[j].label, sim.ops[j].tone);
    }
    idleBefore(Infinity);
    return boxes.row(row.label);
  }

  curveRow(sim, row) {
    if (row.curve !== "headroom" && !CURVES[row.curve])
      throw new Error(`row: expected curve headroom, ${Object.keys(CURVES).join(" or ")}, got ${row.curve}`);
    const curve = curveOf(sim, row.curve, row.device);
    return { type: "curve", label: row.label, curve, colour: row.colour ?? "headroom", unit: "" };
  }

  readouts(time) {
    return (this.panel.readouts ?? []).map((readout) => ({ label: readout.label, text: this.readout(readout, time) }));
  }

  readout(readout, time) {
    if (readout.type === "text") return readout.text;
    const sim = this.sim(readout.timeline);
    const device = readout.device ?? 0;
    if (readout.type === "cpu") {
      const { kind, label } = hostAt(sim, readout.thread ?? 0, time);
      return kind === "done" ? "done" : `${{ submit: "submitting", wait: "waiting:" }[kind] ?? "working:"} ${label}`;
    }
    if (readout.type === "gpu") {
      const state = deviceAt(sim, device, time);
      if (state.kind === "execute") return `executing ${state.ops.map((j) => sim.ops[j].label).join(", ")}`;
      if (state.kind === "done") return "done";
      const { label } = sim.ops[state.next];
      return state.reason === "submission" ? `idle: waiting for ${label}’s submission` : `idle: ${label} waits for a dependency`;
    }
    if (readout.type === "queued_ops") return String(queuedOps(sim, time));
    if (readout.type === "queued_blocks") return String(curveAt(curveOf(sim, "queued_blocks"), time));
    if (readout.type === "blocks_ahead") {
      const ahead = curveAt(curveOf(sim, "blocks_ahead"), time);
      return `CPU ahead by ${ahead} block${ahead === 1 ? "" : "s"}`;
    }
    if (readout.type === "headroom") return formatValue(curveAt(curveOf(sim, "headroom", device), time), this.unit);
    const value = total(sim, readout.metric, device);
    if (readout.type === "total") return formatValue(value, this.unit);
    if (readout.type === "choice") return value > readout.threshold ? readout.above : readout.below;
    throw new Error(`readout: unknown type ${readout.type}`);
  }

  legend() {
    const named = this.panel.legend ?? [];
    return [...named, ...KINDS.filter((kind, k) => !named.includes(kind) && this.rows.some((r) => r.kind?.includes(k)))];
  }
}

class RecordedSource {
  constructor(spec, buffer) {
    this.spec = spec;
    this.unit = "ns";
    this.controls = [];
    const types = { f8: Float64Array, u4: Uint32Array, u1: Uint8Array };
    const column = ({ type, offset, length }) => new types[type](buffer, offset, length);
    const [start, end, kind, name] = ["start", "end", "kind", "name"].map((c) => column(spec.columns[c]));
    this.rows = spec.lanes.map(({ label, lane: laneLabel, first, count, slim }) => ({
      type: "lane",
      label,
      lane: laneLabel,
      kinds: spec.kinds,
      slim,
      start: start.subarray(first, first + count),
      end: end.subarray(first, first + count),
      kind: kind.subarray(first, first + count),
      name: (i) => spec.names[name[first + i]],
    }));
    for (const { label, unit, colour, t, before, after } of spec.curves)
      this.rows.push({ type: "curve", label, unit, colour, curve: { t: column(t), before: column(before), after: column(after) } });
    this.extent = spec.extent;
  }

  update() {}

  readouts(time) {
    const byLane = new Map();
    for (const row of this.rows) {
      if (row.type === "curve") {
        byLane.set(row.label, formatValue(curveAt(row.curve, time), row.unit));
        continue;
      }
      const i = lastAtOrBefore(row.start, time);
      const inside = i >= 0 && time < row.end[i];
      // Sub-rows go outward in: the last one that covers the cursor is the innermost event.
      if (inside) byLane.set(row.lane, `${row.name(i)} (${formatValue(row.end[i] - row.start[i], "ns")})`);
      else if (!byLane.has(row.lane)) byLane.set(row.lane, "nothing recorded");
    }
    return [...byLane].map(([label, text]) => ({ label, text }));
  }

  legend() {
    const used = new Set();
    for (const row of this.rows) if (row.type === "lane") for (const k of row.kind) used.add(k);
    return [...this.spec.kinds.filter((_, k) => used.has(k)), ...new Set(this.spec.curves.map((c) => c.colour))];
  }
}

/** The next (or previous) start or end of a box after `time`, over all lanes; null where none is. */
function nextBoundary(rows, time, forward, tolerance) {
  let best = null;
  const offer = (t) => {
    if (forward ? t > time + tolerance && (best === null || t < best) : t < time - tolerance && (best === null || t > best)) best = t;
  };
  for (const row of rows) {
    if (row.type !== "lane") continue;
    for (const edges of [row.start, row.end]) {
      if (forward) {
        const i = lastAtOrBefore(edges, time + tolerance) + 1;
        if (i < edges.length) offer(edges[i]);
      } else {
        let i = lastAtOrBefore(edges, time);
        while (i >= 0 && edges[i] >= time - tolerance) i--;
        if (i >= 0) offer(edges[i]);
      }
    }
  }
  return best;
}
