// The replay of answers: a list of them, one or two canvases, and a dock that moves in time.

const PACE = 12; // seconds that a whole replay takes at most
const FRAME = [30, 400]; // the least and the most milliseconds of a step

const FILTERS = {
  all: ["All", () => true],
  right: ["Right", ([a]) => a.right === true],
  wrong: ["Wrong", ([a]) => a.right === false],
  cut: ["Cut", (sides) => sides.some((a) => a.cut)],
};
const FILTERS_OF_TWO = {
  all: FILTERS.all,
  second: ["B ahead", ([a, b]) => gain(a, b) > 0],
  first: ["A ahead", ([a, b]) => gain(a, b) < 0],
  same: ["Same reward", ([a, b]) => gain(a, b) === 0],
  cut: FILTERS.cut,
};
const LETTERS = ["A", "B"];

function gain(a, b) {
  return a.row.r === undefined || b.row.r === undefined ? null : b.row.r - a.row.r;
}

class Trace {
  // files: of the data; pairs: [row of the first, row of the second], or null. Two files
  // without pairs are shown one after the other.
  constructor({ files, pairs }) {
    this.files = files;
    for (const file of files) file.pictures ??= files[0].pictures; // of two the first has those of both
    this.compared = Boolean(pairs);
    const answers = files.map((file) => file.rows.map((row) => new Answer(file, row)));
    this.entries = pairs
      ? pairs.map((pair) => pair.map((row, side) => answers[side][row]))
      : answers.flat().map((answer) => [answer]);
    this.filters = this.compared ? FILTERS_OF_TWO : FILTERS;
    this.modes = Object.keys(MODES).filter(
      (mode) => mode === "order" || files.some((f) => f.rows.some((r) => r[MODES[mode].letter] !== undefined)),
    );
    this.most = {};
    for (const mode of this.modes.filter((name) => MODES[name].signed)) {
      this.most[mode] = largest(files, MODES[mode].letter);
    }
    this.state = { filter: "all", search: "", mode: "order", entry: 0, step: 0 };
    this.timer = null;
    this.build();
    this.list();
    this.open(0);
  }

  // ---- What stays ----------------------------------------------------------------------

  build() {
    this.items = el("div", { class: "items" });
    this.chips = el("div", { class: "chips", role: "group", "aria-label": "Filter" });
    const input = (event) => {
      this.state.search = event.target.value.toLowerCase();
      this.list();
    };
    this.search = el("input", { type: "search", placeholder: "Search", input });
    this.search.setAttribute("aria-label", "Search in prompts and answers");
    this.toggle = el("button", { class: "toggle", "aria-expanded": "false" });
    const side = el("nav", { class: "list", "aria-label": "Answers" }, this.toggle,
      el("div", { class: "fold" }, this.search, this.chips, this.items));
    this.toggle.addEventListener("click", () => {
      const open = side.classList.toggle("open");
      this.toggle.setAttribute("aria-expanded", String(open));
    });
    this.side = side;
    this.stage = el("div", { class: "stage" });
    this.node = el("section", { class: "trace" }, side, el("div", { class: "main" },
      this.stage, this.dock()));
    document.addEventListener("keydown", (event) => this.key(event));
  }

  dock() {
    this.strips = el("div", { class: "strips" });
    this.slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "Step" });
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.player = el("button", { class: "play", click: () => this.play() });
    this.counter = el("output", { class: "counter" });
    const move = (sign, name, to) => el("button", {
      "aria-label": name, title: name, click: () => this.go(to()),
    }, icon(sign));
    const bar = el("div", { class: "transport" },
      move("first", "To the beginning", () => 0),
      move("back", "A step back", () => this.state.step - 1),
      this.player,
      move("on", "A step on", () => this.state.step + 1),
      move("last", "To the end", () => this.end),
      this.slider, this.counter);
    this.colours = el("div", { class: "colours" });
    this.facts = el("p", { class: "facts" });
    return el("div", { class: "dock" }, this.strips, bar, el("div", { class: "below" },
      this.colours, this.facts));
  }

  // ---- The list ------------------------------------------------------------------------

  // Lists the answers that filter and search leave.
  list() {
    const { filter, search } = this.state;
    const found = this.entries.map((sides, i) => [sides, i]).filter(([sides]) =>
      !search || sides.some((a) => `${a.row.q}\n${a.text}`.toLowerCase().includes(search)));
    this.chips.replaceChildren(...Object.entries(this.filters).map(([name, [label, test]]) => {
      const size = found.filter(([sides]) => test(sides)).length;
      if (!size && name !== "all" && name !== filter) return null;
      const click = () => {
        this.state.filter = name;
        this.list();
      };
      return el("button", { class: "chip", click, "aria-pressed": String(name === filter) },
        label, el("small", {}, grouped(size)));
    }).filter(Boolean));
    this.chips.hidden = this.chips.childElementCount < 2;
    const left = found.filter(([sides]) => this.filters[filter][1](sides));
    this.shown = left.map(([, i]) => i);
    this.items.replaceChildren(...this.rows(left));
    if (!left.length) this.items.append(el("p", { class: "quiet" }, "None."));
    this.mark();
  }

  // Answers to one prompt stand below it; a prompt with one answer stands for it.
  rows(left) {
    const rows = [];
    this.buttons = new Map();
    left.forEach(([sides, i], place) => {
      const [answer] = sides, of = (k) => left[k]?.[0][0];
      if (!this.compared && this.files.length > 1 && of(place - 1)?.file !== answer.file) {
        rows.push(el("h2", {}, answer.file.name));
      }
      // Of what was skipped there is no prompt.
      const same = (k) => answer.row.q && of(k)?.row.q === answer.row.q && of(k).file === answer.file;
      const first = !same(place - 1), alone = first && !same(place + 1);
      if (first && !alone) rows.push(el("h3", { dir: "auto" }, excerpt(answer.row.q)));
      const text = alone ? answer.row.q : answer.text;
      const said = !alone && answer.picture ? image(answer.picture, "A drawing", "thumb")
        : excerpt(text) || "\u2013";
      const click = () => {
        this.side.classList.remove("open");
        this.open(i);
      };
      const button = el("button", { class: alone ? "item" : "item of", click },
        el("span", { class: "verdicts" }, sides.map(verdict)),
        el("span", { class: "said", dir: "auto" }, said),
        el("small", {}, sides.map((a) => fixed(a.speed, 2)).join(" \u2192 ")));
      this.buttons.set(i, button);
      rows.push(button);
    });
    return rows;
  }

  // Marks the open answer in the list.
  mark() {
    for (const [i, button] of this.buttons) {
      button.setAttribute("aria-current", String(i === this.state.entry));
    }
    const place = this.shown.indexOf(this.state.entry);
    const total = count(this.shown.length, "answer");
    this.toggle.textContent = place < 0 ? total : `Answer ${place + 1} of ${total.split(" ")[0]}`;
  }

  // ---- One answer, or a pair -----------------------------------------------------------

  open(entry) {
    if (!this.entries.length) return;
    this.state.entry = entry;
    this.pause();
    this.sides = this.entries[entry];
    this.end = Math.max(...this.sides.map((answer) => answer.last));
    this.canvases = this.sides.map((answer) => new Canvas(answer, (i) => this.tell(answer, i)));
    if (this.compared) this.difference();
    const [{ row }] = this.sides;
    this.stage.replaceChildren(
      el("div", { class: "prompt" }, el("h2", {}, "Prompt"),
        el("div", { class: "asked" }, shown(this.sides[0]),
          el("p", { dir: "auto" }, visible(row.q) || "\u2013"))),
      el("div", { class: this.compared ? "sides two" : "sides" },
        this.canvases.map((canvas, side) => this.panel(canvas, side))));
    this.bars = this.sides.map((answer) => new Strip(answer, this.end, (s) => this.go(s)));
    this.strips.replaceChildren(...this.bars.map((strip, side) =>
      el("div", { class: "lane" }, this.compared ? badge(side) : null, strip.node)));
    this.slider.max = this.end;
    this.mode(this.state.mode);
    this.go(this.end);
    this.mark();
    this.buttons.get(entry)?.scrollIntoView({ block: "nearest" });
  }

  // Marks the token of each answer in which their texts differ first: another tokenizer may
  // have cut the same text elsewhere. What is no text differs as a whole.
  difference() {
    const words = { [PART]: () => "", [UNKNOWN]: (text) => `${text} `, [CODE]: (text) => `${text} ` };
    const cut = this.sides.map(({ pieces }) =>
      pieces.map(([text, kind]) => (words[kind] ?? String)(text)));
    const [x, y] = cut.map((texts) => texts.join(""));
    let k = 0;
    while (k < x.length && x[k] === y[k]) k += 1;
    this.canvases.forEach((canvas, side) => {
      let end = 0;
      canvas.differs = cut[side].findIndex((text) => (end += text.length) > k);
    });
  }

  panel(canvas, side) {
    const { answer } = canvas, { row } = answer;
    const facts = [
      row.r === undefined ? null : [verdict(answer), `reward ${short(row.r)}`],
      [count(row.t.length, answer.noun)],
      answer.speed === null ? null : [`${fixed(answer.speed, 2)} per forward`],
      [count(answer.last, "step")],
      row.e === "length" ? ["cut at its limit"] : null,
      row.g === undefined ? null : ["gold ", el("b", { dir: "auto" }, excerpt(row.g, 40) || "\u2013")],
    ];
    const heading = this.compared
      ? el("h2", {}, badge(side), excerpt(answer.file.name, 40))
      : el("h2", {}, "Answer");
    return el("article", { class: "panel" }, el("header", {}, heading,
      el("ul", {}, facts.filter(Boolean).map((parts) => el("li", {}, parts)))), drawing(canvas));
  }

  // ---- Time ----------------------------------------------------------------------------

  go(step) {
    step = Math.max(0, Math.min(this.end, step));
    this.state.step = step;
    for (const canvas of this.canvases) canvas.show(step);
    for (const strip of this.bars) strip.show(step);
    this.slider.value = step;
    this.slider.setAttribute("aria-valuetext", `step ${step} of ${this.end}`);
    this.slider.style.setProperty("--share", `${this.end ? (100 * step) / this.end : 100}%`);
    this.counter.textContent = `${step}\u2009/\u2009${this.end}`;
    if (step === this.end) this.pause();
    this.tell(null, -1);
  }

  play() {
    if (this.timer) return this.pause();
    if (this.state.step === this.end) this.go(0);
    const [least, most] = FRAME;
    const pace = Math.max(least, Math.min(most, (1000 * PACE) / (this.end || 1)));
    this.timer = setInterval(() => {
      this.go(this.state.step + 1);
      const [canvas] = this.canvases;
      if (this.timer) canvas.tokens[canvas.fresh[0]]?.scrollIntoView({ block: "nearest" });
    }, pace);
    this.player.replaceChildren(icon("pause"));
    this.player.setAttribute("aria-label", "Pause");
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.player.replaceChildren(icon("play"));
    this.player.setAttribute("aria-label", "Play");
  }

  // ---- Colours, and what one token says ------------------------------------------------

  mode(name) {
    this.state.mode = name;
    for (const canvas of this.canvases) canvas.paint(name, this.most[name]);
    const buttons = this.modes.map((mode) => el("button", {
      class: "mode", "aria-pressed": String(mode === name), click: () => this.mode(mode),
    }, MODES[mode].name));
    const { low, high, signed: both } = MODES[name], most = this.most[name];
    const ends = both ? [signed(-most, 2), signed(most, 2)] : [low, high];
    const scale = el("span", { class: "scale", "data-mode": name }, ...swatches(name, both));
    const legend = name === "picture" ? null : el("div", { class: "legend" }, ends[0], scale, ends[1]);
    this.colours.replaceChildren(
      ...[el("div", { class: "modes", role: "group", "aria-label": "Colour" }, buttons), legend]
        .filter(Boolean));
  }

  // Tells of a token, or where there is none of the present step.
  tell(answer, i) {
    if (i < 0 || !answer) {
      this.facts.replaceChildren(...this.present());
      return;
    }
    const [text, kind, id] = answer.pieces[i];
    const block = answer.block(i), logp = answer.number("l", i), c = answer.number("c", i);
    const facts = [
      kind === UNKNOWN ? null : ["id", grouped(id)],
      kind !== CODE ? null : ["row", Math.floor(i / answer.side) + 1],
      kind !== CODE ? null : ["column", (i % answer.side) + 1],
      ["step", `${answer.steps[i]} of ${answer.last}`],
      block < 0 ? null : ["block", block + 1],
      c === null ? null : ["confidence", percent(c)],
      logp === null ? null : ["log-prob", fixed(logp, 2)],
      ...["a", "v"].map((x, k) => answer.number(x, i) === null ? null
        : [["advantage", "value"][k], signed(answer.number(x, i), 2)]),
    ].filter(Boolean);
    this.facts.replaceChildren(
      kind === CODE ? el("b", {}, "Code") : el("code", { dir: "auto" }, kind === PART ? `bytes ${text}` : quoted(text)),
      ...facts.map(([name, value]) => el("span", {}, `${name} `, el("b", {}, String(value)))));
  }

  present() {
    const { step } = this.state;
    if (!step) return ["Nothing is written yet."];
    const told = this.sides.map((answer) => count(answer.written(step), answer.noun));
    const verb = this.sides.every((answer) => answer.drawing) ? "drew" : "wrote";
    const text = `Step ${step} ${verb} ${told.join(" in A, ")}${told.length > 1 ? " in B" : ""}.`;
    return [text];
  }

  // ---- Keys ----------------------------------------------------------------------------

  key(event) {
    const { target } = event, typing = target.matches?.("input:not([type=range]), textarea");
    if (event.ctrlKey || event.metaKey || event.altKey || !this.visible()) return;
    if (typing) {
      if (event.key === "Escape") target.blur();
      return;
    }
    const next = (by) => {
      const place = this.shown.indexOf(this.state.entry) + by;
      if (this.shown[place] !== undefined) this.open(this.shown[place]);
    };
    const actions = {
      ArrowLeft: () => this.go(this.state.step - 1),
      ArrowRight: () => this.go(this.state.step + 1),
      Home: () => this.go(0),
      End: () => this.go(this.end),
      " ": () => this.play(),
      "[": () => next(-1),
      "]": () => next(1),
      c: () => this.mode(this.modes[(this.modes.indexOf(this.state.mode) + 1) % this.modes.length]),
      "/": () => this.search.focus(),
    };
    if (!this.entries.length || !Object.hasOwn(actions, event.key)) return;
    if (event.key === " " && target.matches?.("button, summary, a")) return;
    event.preventDefault();
    actions[event.key]();
  }

  // Whether the reader has it in view: in a report the keys scroll elsewhere.
  visible() {
    const { top, bottom } = this.node.getBoundingClientRect();
    return top < 0.7 * innerHeight && bottom > 0.3 * innerHeight;
  }
}

// ---- Bars: tokens of each step ------------------------------------------------------------

class Strip {
  // end: the last step of the axis, which two strips share; onStep: called with a step.
  constructor(answer, end, onStep) {
    this.answer = answer;
    this.end = Math.max(end, 1);
    this.high = 1;
    for (let s = 1; s <= answer.last; s++) this.high = Math.max(this.high, answer.written(s));
    this.past = svg("path", { class: "past" });
    this.future = svg("path", { class: "future" });
    this.now = svg("path", { class: "now" });
    const bands = answer.blocks.map(([first, last, tokens], i) => svg("rect", {
      class: i % 2 ? "band odd" : "band", x: first - 1, width: last - first + 1, y: 44, height: 4,
    }, svg("title", {}, `block ${i + 1}: ${count(last - first + 1, "step")}, ${count(tokens, "token")}`)));
    const plot = svg("svg", {
      viewBox: `0 0 ${this.end} 48`, preserveAspectRatio: "none", "aria-hidden": "true",
    }, this.future, this.past, this.now, bands);
    // Few steps are not drawn out over the whole width.
    plot.style.maxWidth = `${30 * this.end}px`;
    this.node = el("div", { class: "strip" }, plot,
      el("span", { class: "axis" }, `max ${this.high}`));
    plot.addEventListener("pointerdown", (event) => {
      const { left, width } = plot.getBoundingClientRect();
      onStep(Math.ceil(((event.clientX - left) / width) * this.end));
    });
  }

  show(step) {
    const bars = (from, to) => {
      const gap = this.end < 160 ? 0.12 : 0;
      let d = "";
      for (let s = from; s <= Math.min(to, this.answer.last); s++) {
        const height = (40 * this.answer.written(s)) / this.high;
        if (height) d += `M${s - 1 + gap} 42v${-height}h${1 - 2 * gap}v${height}z`;
      }
      return d;
    };
    this.past.setAttribute("d", bars(1, step - 1));
    this.now.setAttribute("d", bars(Math.max(step, 1), step));
    this.future.setAttribute("d", bars(step + 1, this.end));
  }
}

// ---- Small things -------------------------------------------------------------------------

const ICONS = {
  play: "M5 3v10l9-5z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  back: "M11 4v8L5 8z",
  on: "M5 4v8l6-4z",
  first: "M13 4v8L7 8zM3 4h2v8H3z",
  last: "M3 4v8l6-4zM11 4h2v8h-2z",
};

// Small pictures are shown as the pixels that they are.
function image(source, alt, classes = "") {
  const node = el("img", { src: source, alt, class: classes });
  node.addEventListener("load", () => node.classList.toggle("pixels", node.naturalWidth <= 128));
  return node;
}

// The pictures that a prompt showed; of one that the page has not, why.
function shown({ file, row }) {
  return (row.i ?? []).map((x, k) => typeof x === "string"
    ? el("p", { class: "notice" }, visible(x))
    : image(file.pictures[x], `Image ${k + 1} of the prompt`, "seen"));
}

// A canvas; of a drawing it stands beside what it became.
function drawing(canvas) {
  const { answer } = canvas;
  if (!answer.drawing) return canvas.node;
  const done = answer.picture ? image(answer.picture, "The finished picture", "done")
    : el("p", { class: "notice" }, visible(String(answer.row.p)));
  return el("div", { class: "drawing" }, canvas.node, el("figure", {}, done,
    el("figcaption", {}, "The finished picture")));
}

function icon(name) {
  return svg("svg", { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" },
    svg("path", { d: ICONS[name] }));
}

function badge(side) {
  return el("span", { class: `badge side${side}` }, LETTERS[side]);
}

function verdict(answer) {
  const [sign, name] = answer.right === null ? ["\u00b7", "not graded"]
    : answer.right ? ["\u2713", "right"] : ["\u2717", "wrong"];
  return el("span", { class: `verdict ${name.replace(" ", "-")}`, role: "img", "aria-label": name }, sign);
}

function quoted(text) {
  return `\u201c${visible(text.replaceAll("\n", "\u21b5")).slice(0, 60)}\u201d`;
}

function swatches(mode, both) {
  const level = (i, minus) => el("i", { class: `token shown q${i}${minus ? " minus" : ""}` });
  const plus = Array.from({ length: LEVELS }, (_, i) => level(i, false));
  if (both) return [...plus.slice(1).map((_, i) => level(LEVELS - 1 - i, true)), ...plus];
  return mode === "order" ? plus : plus.reverse();
}

// The largest size of a per-token number in all files.
function largest(files, letter) {
  let most = 0;
  for (const file of files) {
    for (const row of file.rows) for (const x of row[letter] ?? []) most = Math.max(most, Math.abs(x));
  }
  return most / 100;
}
