// Charts: the curves of one panel, of one run or two, and the seconds of each step.

const WIDE = 330, HIGH = 150, LEFT = 42, BOTTOM = 18, TOP = 6, RIGHT = 6;
const FEW = 30; // points that are drawn one by one
const BARS = 500; // of a chart; of more steps several share one
const FLAT = 1e-4; // of a value: what moves less is drawn as what does not move
const DIGIT = 6.5; // pixels of a digit of an axis, or more
const HUES = 6; // .line0 to .line5; further lines are dashed, and then dotted

// About so many round numbers between two.
function ticks(low, high, about) {
  const raw = (high - low) / about || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * ([1, 2, 5, 10].find((x) => x * unit >= raw) ?? 10);
  const first = Math.ceil(low / step), found = [];
  // Of very large numbers the next one is the same.
  for (let i = 0; i <= 2 * about && (first + i) * step <= high * (1 + 1e-9); i++) found.push((first + i) * step);
  return found;
}

// A round number in full, as its neighbours may differ in the last digit alone.
function tickText(t) {
  const size = Math.abs(t), whole = Number.isInteger(t) && size < 1e6;
  if (whole) return size < 1e4 ? fixed(t, 0) : grouped(t);
  const text = size >= 1e-3 && size < 1e4 ? String(t) : t.toExponential().replace("e+", "e");
  return text.replaceAll("-", MINUS);
}

// The running mean at a point, as a function of its number: of a long run few points are drawn.
function running(values) {
  // Of a long run's steps a pixel has many: the mean of a few would fill its chart.
  const half = Math.max(Math.min(Math.floor(values.length / 20) + 1, 8), Math.floor(values.length / 200));
  return (i) => mean(values.slice(Math.max(i - half, 0), i + half + 1));
}

// The numbers of the points that are drawn: of those that share a bar the least and the largest.
function extremes(values) {
  const size = Math.ceil(values.length / BARS);
  if (size < 3) return [...values.keys()];
  const firsts = [...values.keys()].filter((i) => i % size === 0);
  return firsts.flatMap((first) => {
    const bar = [...values.slice(first, first + size).keys()].map((i) => first + i);
    bar.sort((i, j) => values[i] - values[j]);
    return [bar[0], bar.at(-1)].sort((i, j) => i - j);
  });
}

class Chart {
  // lines: [{label, points: [[step, value]], run}]; runs: how many are compared.
  constructor({ title, log, lines }, runs) {
    this.lines = lines;
    this.log = log;
    const all = lines.flatMap((line) => line.points);
    const [xs, ys] = [all.map(([x]) => x), all.map(([, y]) => this.scaled(y))];
    const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
    const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
    [this.x0, this.x1] = [least(xs), most(xs)];
    // On the scale of what moves by rounding alone no round number follows another: no end of them.
    const [moves, size] = [most(ys) - least(ys), Math.max(...[least(ys), most(ys)].map(Math.abs))];
    const room = (moves < FLAT * size ? 0.1 * size : 0.06 * moves) || 1;
    [this.y0, this.y1] = [least(ys) - room, most(ys) + room];
    // What is nowhere below zero has no axis there: an accuracy of 0 all along, say.
    if (!log && least(ys) >= 0) this.y0 = Math.max(this.y0, -0.06 * this.y1);
    this.rows = ticks(this.y0, this.y1, 5).filter((t) => !log || Number.isInteger(t));
    this.words = this.rows.map((t) => (log ? `1e${t}`.replace("-", MINUS) : tickText(Number(t.toPrecision(6)))));
    this.left = Math.max(LEFT, 2 * RIGHT + DIGIT * Math.max(0, ...this.words.map((text) => text.length)));
    this.cross = svg("path", { class: "cross" });
    this.plot = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": title },
      this.axes(), lines.map((line, i) => this.curve(line, this.classOf(line, i, runs))), this.cross);
    this.legend = el("p", { class: "legend-line" });
    this.node = el("figure", { class: "chart" }, el("figcaption", {}, title), this.legend, this.plot);
    this.names = lines.map((line, i) => [this.classOf(line, i, runs), runs > 1
      ? `${LETTERS[line.run]}${lines.some((l) => l.run === line.run && l !== line) ? ` ${line.label}` : ""}`
      : line.label]);
    this.plot.addEventListener("pointermove", (event) => this.hover(event));
    this.plot.addEventListener("pointerleave", () => this.tell(null));
    this.tell(null);
  }

  classOf(line, i, runs) {
    const drawn = ["", " dashed", " dotted"], most = drawn.length - 1;
    if (runs < 2) return `line line${i % HUES}${drawn[Math.min(Math.floor(i / HUES), most)]}`;
    const first = this.lines.findIndex((other) => other.run === line.run);
    return `line run${line.run}${drawn[Math.min(i - first, most)]}`;
  }

  scaled(y) {
    return this.log ? Math.log10(y) : y;
  }

  x(step) {
    return this.left + ((step - this.x0) / (this.x1 - this.x0 || 1)) * (WIDE - this.left - RIGHT);
  }

  // Where the number of a step stands: below it, and inside of the chart.
  inside(step) {
    return Math.min(this.x(step), WIDE - DIGIT / 2 * grouped(step).length);
  }

  y(value) {
    return HIGH - BOTTOM - ((value - this.y0) / (this.y1 - this.y0)) * (HIGH - BOTTOM - TOP);
  }

  axes() {
    const { rows, words } = this;
    const grid = rows.map((t) => `M${this.left} ${this.y(t)}H${WIDE - RIGHT}`).join("");
    return [svg("path", { class: "grid", d: grid }),
      rows.map((t, i) => svg("text", { x: this.left - 6, y: this.y(t) + 3.5, class: "tick y" }, words[i])),
      ticks(this.x0, this.x1, 4).filter(Number.isInteger).map((t) =>
        svg("text", { x: this.inside(t), y: HIGH - 4, class: "tick x" }, grouped(t)))].flat();
  }

  curve({ points }, name) {
    const values = points.map(([, y]) => this.scaled(y)), drawn = extremes(values);
    const path = (height) => svg("path", { d: drawn.map((i, k) =>
      `${k ? "L" : "M"}${this.x(points[i][0]).toFixed(1)} ${this.y(height(i)).toFixed(1)}`).join("") });
    const raw = path((i) => values[i]);
    if (points.length > FEW) {
      raw.setAttribute("class", "raw");
      return svg("g", { class: name }, raw, path(running(values)));
    }
    return svg("g", { class: name }, raw, points.map(([step], i) =>
      svg("circle", { cx: this.x(step), cy: this.y(values[i]), r: 2.2 })));
  }

  hover(event) {
    const { left, width } = this.plot.getBoundingClientRect();
    const at = this.x0 + (((event.clientX - left) / width) * WIDE - this.left)
      / (WIDE - this.left - RIGHT) * (this.x1 - this.x0);
    const near = (points) => points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
    this.tell(near(this.lines.map((line) => near(line.points)))[0]);
  }

  // Tells the values at a step; null: the last ones.
  tell(step) {
    this.cross.setAttribute("d", step === null ? "" : `M${this.x(step)} ${TOP}V${HIGH - BOTTOM}`);
    const told = this.lines.map(({ points }, i) => {
      const point = step === null ? points.at(-1) : points.find(([x]) => x === step);
      const [name, label] = this.names[i];
      return el("span", {}, el("i", { class: `key ${name}` }), this.lines.length > 1 ? `${label} ` : "",
        el("b", {}, point ? short(point[1]) : "\u2013"));
    });
    this.legend.replaceChildren(...told, el("small", {}, step === null ? "last" : `step ${grouped(step)}`));
  }
}

// The seconds of each step, its phases on top of each other, and each phase's share.
function timeChart({ names, steps, seconds }) {
  const size = Math.ceil(steps.length / BARS);
  const firsts = [...steps.keys()].filter((i) => i % size === 0);
  const lastOf = (i) => Math.min(i + size, steps.length) - 1;
  const bars = firsts.map((i) => names.map((_, k) => mean(seconds.slice(i, lastOf(i) + 1).map((row) => row[k]))));
  const titles = firsts.map((i) => (i === lastOf(i) ? `step ${grouped(steps[i])}`
    : `mean of steps ${grouped(steps[i])} to ${grouped(steps[lastOf(i)])}`));
  const totals = bars.map((row) => row.reduce((a, b) => a + b, 0));
  // The first step compiles, and would hide the others.
  const sorted = [...totals].sort((a, b) => a - b);
  const high = 1.25 * sorted[Math.floor(0.97 * (sorted.length - 1))] || 1;
  const wide = 1000, tall = 150, width = wide / bars.length, gap = bars.length < 200 ? 0.15 * width : 0;
  const rects = bars.flatMap((row, i) => {
    let below = 0;
    return row.map((x, k) => {
      const height = (Math.min(below + x, high) - Math.min(below, high)) / high * tall;
      const y = tall - Math.min(below, high) / high * tall - height;
      below += x;
      return svg("rect", { class: `phase phase${k}`, x: i * width + gap / 2, y, width: width - gap, height },
        svg("title", {}, `${titles[i]}: ${names[k]} ${short(x)} s of ${short(totals[i])} s`));
    });
  });
  const whole = seconds.flat().reduce((a, b) => a + b, 0);
  const shares = names.map((name, k) => {
    const sum = seconds.reduce((a, row) => a + row[k], 0);
    return el("span", {}, el("i", { class: `key phase${k}` }), `${name} `, el("b", {}, percent(sum / (whole || 1))));
  });
  const over = totals.filter((x) => x > high).length;
  return el("div", { class: "time" },
    el("p", { class: "legend-line" }, shares, el("small", {}, `${short(whole)} s in ${count(steps.length, "step")}`)),
    svg("svg", { viewBox: `0 0 ${wide} ${tall}`, preserveAspectRatio: "none", role: "img",
      "aria-label": "Seconds of each step" }, rects),
    el("p", { class: "quiet ends" }, el("span", {}, `step ${grouped(steps[0])}`),
      over ? el("span", {}, `${count(over, size > 1 ? "bar" : "step")} above ${short(high)} s cut off`) : null,
      el("span", {}, `step ${grouped(steps.at(-1))}`)));
}
