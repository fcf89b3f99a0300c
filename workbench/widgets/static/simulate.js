// The queue model's rule, the same as workbench/models/submission.py: both are tested against tests/vectors.
// A redraw must not wait for a kernel, so the rule runs where the picture is drawn.

const fail = (message) => {
  throw new Error(message);
};

function nonNegative(value, what) {
  const number = value === undefined ? 0 : value;
  if (typeof number !== "number" || !Number.isFinite(number) || number < 0)
    fail(`${what}: expected a finite time >= 0, got ${String(value)}`);
  return number;
}

/** Run a program; returns times per host step and per device operation, lanes, blocks and the makespan. */
function simulate(program) {
  const steps = program.steps ?? [];
  const hostStart = new Float64Array(steps.length);
  const hostEnd = new Float64Array(steps.length);
  const ops = [];
  const submitted = [];
  const start = [];
  const end = [];
  const clock = new Map();
  const free = new Map();
  const threads = new Map();
  const lanes = new Map();
  const lastOp = new Map();
  const events = new Map();
  const stacks = new Map();
  const blocks = [];
  const key = (device, stream) => `gpu${device}/s${stream}`;

  const enqueue = (op, time, step, block, where) => {
    const device = op.device ?? 0;
    const lane = key(device, op.stream ?? 0);
    const duration = nonNegative(op.duration, `${where}, duration of ${op.label}`);
    let begin = Math.max(time, free.get(lane) ?? 0);
    for (const name of op.after ?? []) {
      if (!lastOp.has(name)) fail(`${where}: ${op.label} runs after ${name}, which no earlier operation is called`);
      begin = Math.max(begin, end[lastOp.get(name)]);
    }
    const index = ops.length;
    ops.push({ label: op.label, duration, device, lane, step, block, tone: op.tone });
    submitted.push(time);
    start.push(begin);
    end.push(begin + duration);
    free.set(lane, begin + duration);
    lastOp.set(op.label, index);
    if (!lanes.has(lane)) lanes.set(lane, []);
    lanes.get(lane).push(index);
  };

  for (const op of program.lead ?? []) enqueue(op, 0, -1, -1, "lead");

  steps.forEach((step, i) => {
    const where = `step ${i} (${step.kind})`;
    const thread = step.thread ?? 0;
    const before = clock.get(thread) ?? 0;
    let now = before;
    const lane = key(step.device ?? 0, step.stream ?? 0);
    if (step.kind === "submit") {
      now += nonNegative(step.cost, `${where}, cost`);
      const stack = stacks.get(thread) ?? [];
      const inside = stack.findLast((range) => range.level === "block");
      for (const op of step.ops ?? fail(`${where}: expected ops, got none`))
        enqueue(op, now, i, inside ? inside.index : -1, where);
    } else if (step.kind === "work") {
      now += nonNegative(step.cost, `${where}, cost`);
    } else if (step.kind === "wait") {
      let target = 0;
      if (step.op !== undefined)
        target = end[lastOp.get(step.op) ?? fail(`${where}: no earlier operation is called ${step.op}`)];
      else if (step.event !== undefined)
        target = events.get(step.event) ?? fail(`${where}: no earlier event is called ${step.event}`);
      else if (step.stream !== undefined) target = free.get(lane) ?? 0;
      else if (step.device !== undefined)
        for (const [name, time] of free) {
          if (name.startsWith(`gpu${step.device}/`)) target = Math.max(target, time);
        }
      else fail(`${where}: expected one of op, event, stream, device`);
      now = Math.max(now, target);
    } else if (step.kind === "record") {
      now += nonNegative(step.cost, `${where}, cost`);
      events.set(step.event, Math.max(now, free.get(lane) ?? 0));
    } else if (step.kind === "stream_wait") {
      now += nonNegative(step.cost, `${where}, cost`);
      const time = events.get(step.event) ?? fail(`${where}: no earlier event is called ${step.event}`);
      free.set(lane, Math.max(free.get(lane) ?? 0, time));
    } else if (step.kind === "push") {
      const level = step.level ?? "block";
      const range = { level, name: step.name, index: -1 };
      if (level === "block") {
        range.index = blocks.length;
        blocks.push({ name: step.name, time: now });
      }
      if (!stacks.has(thread)) stacks.set(thread, []);
      stacks.get(thread).push(range);
    } else if (step.kind === "pop") {
      if (!(stacks.get(thread) ?? []).pop()) fail(`${where}: there is no open range to pop`);
    } else {
      fail(`${where}: expected submit, work, wait, record, stream_wait, push or pop`);
    }
    hostStart[i] = before;
    hostEnd[i] = now;
    clock.set(thread, now);
    if (!threads.has(thread)) threads.set(thread, []);
    threads.get(thread).push(i);
  });

  let makespan = 0;
  for (const time of hostEnd) makespan = Math.max(makespan, time);
  for (const time of end) makespan = Math.max(makespan, time);
  const devices = new Map();
  ops.forEach((op, j) => {
    if (!devices.has(op.device)) devices.set(op.device, []);
    devices.get(op.device).push(j);
  });
  return { program, steps, hostStart, hostEnd, ops, submitted, start, end, threads, lanes, devices, blocks, makespan };
}

const ascending = (a, b) => a - b;
const uniqueSorted = (values) => {
  const sorted = Float64Array.from(values).sort();
  let n = 0;
  for (let i = 0; i < sorted.length; i++) if (i === 0 || sorted[i] !== sorted[i - 1]) sorted[n++] = sorted[i];
  return sorted.subarray(0, n);
};

/** Headroom of one FIFO stream on a sorted grid of times: values just before and at each time. */
function streamHeadroom(sim, indices, grid) {
  const work = indices.filter((j) => sim.ops[j].duration > 0);
  const bySubmission = [...work].sort((a, b) => sim.submitted[a] - sim.submitted[b]);
  const before = new Float64Array(grid.length);
  const after = new Float64Array(grid.length);
  let [strict, loose, ended, running] = [0, 0, 0, 0];
  let [strictSum, looseSum, endedSum] = [0, 0, 0];
  for (let i = 0; i < grid.length; i++) {
    const t = grid[i];
    for (; strict < work.length && sim.submitted[bySubmission[strict]] < t; strict++)
      strictSum += sim.ops[bySubmission[strict]].duration;
    for (; loose < work.length && sim.submitted[bySubmission[loose]] <= t; loose++)
      looseSum += sim.ops[bySubmission[loose]].duration;
    for (; ended < work.length && sim.end[work[ended]] <= t; ended++) endedSum += sim.ops[work[ended]].duration;
    while (running < work.length && sim.end[work[running]] <= t) running++;
    let partial = 0;
    if (running < work.length && sim.start[work[running]] < t) partial = t - sim.start[work[running]];
    before[i] = strict === ended ? 0 : strictSum - endedSum - partial;
    after[i] = loose === ended ? 0 : looseSum - endedSum - partial;
  }
  return { before, after };
}

function curveOver(sim, groups, indices) {
  const times = [0, sim.makespan];
  for (const j of indices) times.push(sim.submitted[j], sim.start[j], sim.end[j]);
  const t = uniqueSorted(times);
  const before = new Float64Array(t.length);
  const after = new Float64Array(t.length);
  for (const group of groups) {
    const part = streamHeadroom(sim, group, t);
    for (let i = 0; i < t.length; i++) {
      before[i] += part.before[i];
      after[i] += part.after[i];
    }
  }
  return { t, before, after };
}

/** Exact headroom curve of a stream ("gpu0/s0") as breakpoints {t, before, after}. */
function streamCurve(sim, lane) {
  const indices = sim.lanes.get(lane) ?? [];
  return curveOver(sim, [indices], indices);
}

/** Exact headroom curve of a device: the sum over its streams. */
function deviceCurve(sim, device) {
  const groups = [...sim.lanes].filter(([, list]) => sim.ops[list[0]].device === device).map(([, list]) => list);
  return curveOver(sim, groups, sim.devices.get(device) ?? []);
}

/** Maximal intervals of [lo, hi) in which no operation of the device executes. */
function idleIntervals(sim, device, lo = 0, hi = sim.makespan) {
  const work = (sim.devices.get(device) ?? []).filter((j) => sim.ops[j].duration > 0);
  work.sort((a, b) => sim.start[a] - sim.start[b]);
  const gaps = [];
  let reached = lo;
  for (const j of work) {
    const begin = Math.min(sim.start[j], hi);
    if (begin > reached) gaps.push([reached, begin]);
    reached = Math.max(reached, sim.end[j]);
  }
  if (hi > reached) gaps.push([reached, hi]);
  return gaps;
}

/** First start and last end of a device's work, null where it has none. */
function activeSpan(sim, device) {
  let [lo, hi] = [Infinity, -Infinity];
  for (const j of sim.devices.get(device) ?? []) {
    if (sim.ops[j].duration === 0) continue;
    lo = Math.min(lo, sim.start[j]);
    hi = Math.max(hi, sim.end[j]);
  }
  return lo < hi ? [lo, hi] : null;
}

function blockSpans(sim) {
  const spans = sim.blocks.map(() => [Infinity, Infinity]);
  sim.ops.forEach((op, j) => {
    if (op.block < 0) return;
    const span = spans[op.block];
    span[0] = Math.min(span[0], sim.submitted[j]);
    span[1] = Math.min(span[1], sim.start[j]);
  });
  return spans.filter((span) => span[0] < Infinity);
}

function stepCurve(times, valueAt) {
  const t = uniqueSorted(times);
  const after = t.map(valueAt);
  const before = new Float64Array(t.length);
  for (let i = 1; i < t.length; i++) before[i] = after[i - 1];
  return { t, before, after, stepped: true };
}

/** Number of submitted blocks that have not begun to execute, as a step curve. */
function queuedBlocksCurve(sim) {
  const spans = blockSpans(sim);
  const enter = spans.map((s) => s[0]).sort(ascending);
  const leave = spans.map((s) => s[1]).sort(ascending);
  let [i, j] = [0, 0];
  return stepCurve([0, sim.makespan, ...enter, ...leave], (t) => {
    while (i < enter.length && enter[i] <= t) i++;
    while (j < leave.length && leave[j] <= t) j++;
    return i - j;
  });
}

/** How many blocks the host's current block is ahead of the device's, as a step curve. */
function blocksAheadCurve(sim) {
  const pushes = sim.blocks.map((b) => b.time).sort(ascending);
  const started = sim.ops.map((op, j) => [sim.start[j], op.block]).sort((a, b) => a[0] - b[0]);
  let [i, j, device] = [0, 0, -1];
  return stepCurve([0, sim.makespan, ...pushes, ...started.map((s) => s[0])], (t) => {
    while (i < pushes.length && pushes[i] <= t) i++;
    for (; j < started.length && started[j][0] <= t; j++) device = Math.max(device, started[j][1]);
    return i - 1 - device;
  });
}

/** Value of a curve at time x (right-continuous), 0 outside. */
function curveAt(curve, x) {
  const { t, before, after } = curve;
  const i = lastAtOrBefore(t, x);
  if (i < 0) return 0;
  if (i === t.length - 1 || x === t[i] || curve.stepped) return after[i];
  return after[i] + ((before[i + 1] - after[i]) * (x - t[i])) / (t[i + 1] - t[i]);
}

/** Index of the last element <= x in a sorted array, -1 where none is. */
function lastAtOrBefore(sorted, x) {
  let [lo, hi] = [0, sorted.length];
  while (lo < hi) {
    const mid = (lo + hi) >> 1;
    if (sorted[mid] <= x) lo = mid + 1;
    else hi = mid;
  }
  return lo - 1;
}

/** What a host thread does at time x. */
function hostAt(sim, thread, x) {
  for (const i of sim.threads.get(thread) ?? [])
    if (sim.hostStart[i] <= x && x < sim.hostEnd[i]) {
      const step = sim.steps[i];
      return { kind: step.kind, label: step.label ?? step.event ?? step.name ?? "", step: i };
    }
  return { kind: "done" };
}

/** What a device does at time x: executing, idle before its next operation and why, or done. */
function deviceAt(sim, device, x) {
  const running = [];
  let next = -1;
  for (const j of sim.devices.get(device) ?? []) {
    if (sim.ops[j].duration === 0) continue;
    if (sim.start[j] <= x && x < sim.end[j]) running.push(j);
    else if (sim.start[j] > x && (next < 0 || sim.start[j] < sim.start[next])) next = j;
  }
  if (running.length) return { kind: "execute", ops: running };
  if (next < 0) return { kind: "done" };
  return { kind: "idle", next, reason: sim.submitted[next] > x ? "submission" : "dependency" };
}

/** Number of operations that are submitted and have not begun at time x. */
function queuedOps(sim, x) {
  let count = 0;
  sim.ops.forEach((op, j) => {
    if (op.duration > 0 && sim.submitted[j] <= x && x < sim.start[j]) count++;
  });
  return count;
}

/** A whole-run figure: idle of a device between its first start and last end, the time in waits, or the makespan. */
function total(sim, metric, device = 0) {
  if (metric === "makespan") return sim.makespan;
  if (metric === "wait")
    return sim.steps.reduce((sum, s, i) => (s.kind === "wait" ? sum + sim.hostEnd[i] - sim.hostStart[i] : sum), 0);
  if (metric !== "idle") fail(`readout: expected metric idle, makespan or wait, got ${metric}`);
  const span = activeSpan(sim, device);
  return span ? idleIntervals(sim, device, ...span).reduce((sum, [a, b]) => sum + b - a, 0) : 0;
}
