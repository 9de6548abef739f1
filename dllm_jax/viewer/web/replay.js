// One answer: what its row of the data says, and the canvas on which it is written again.

const LEVELS = 10; // of a colour scale
const LONG = 2000; // tokens of an answer that is replayed without transitions
const PLAIN = 0, SPECIAL = 1, PART = 2, UNKNOWN = 3, CODE = 4; // kinds of pieces, as pieces.py has them

// The colours of tokens: which numbers they show, and where the scale ends.
const MODES = {
  order: { name: "Order", low: "first", high: "last" },
  confidence: { name: "Confidence", letter: "c", low: "0\u202f%", high: "100\u202f%" },
  logprob: { name: "Log-prob", letter: "l", low: `${MINUS}5 nats`, high: "0" },
  advantage: { name: "Advantage", letter: "a", signed: true },
  value: { name: "Value", letter: "v", signed: true },
  picture: { name: "Picture", letter: "p" },
};

class Answer {
  constructor(file, row) {
    this.file = file;
    this.row = row;
    let step = 0;
    this.steps = row.s.map((difference) => (step += difference));
    this.last = this.steps.reduce((most, x) => Math.max(most, x), 0);
    this.pieces = row.t.map((i) => file.pieces[i]);
    file.gap ??= file.pieces.some(([, kind]) => kind === UNKNOWN) ? " " : "";
    this.text = this.pieces
      .filter(([, kind]) => kind === PLAIN || kind === UNKNOWN)
      .map(([text]) => text)
      .join(file.gap);
    this.drawing = this.pieces.some(([, kind]) => kind === CODE); // which is a square
    this.right = row.o ?? null;
    this.cut = row.e === "length";
    this.speed = row.f ? row.t.length / row.f : null;
  }

  // Codes of a row of a drawing.
  get side() {
    return Math.sqrt(this.pieces.length);
  }

  // What a drawing became; undefined where the page has it not.
  get picture() {
    return this.file.pictures?.[this.row.p];
  }

  get noun() {
    return this.drawing ? "code" : "token";
  }

  // The tokens in the order of writing: those of step s are order[starts[s]..starts[s + 1]].
  get order() {
    if (this.sorted) return this.sorted;
    const starts = new Uint32Array(this.last + 2);
    for (const step of this.steps) starts[step + 1] += 1;
    for (let step = 1; step < starts.length; step++) starts[step] += starts[step - 1];
    const next = starts.slice(), tokens = new Uint32Array(this.steps.length);
    this.steps.forEach((step, i) => (tokens[next[step]++] = i));
    return (this.sorted = { starts, tokens });
  }

  // How many tokens a step has written.
  written(step) {
    if (step > this.last) return 0;
    return this.order.starts[step + 1] - this.order.starts[step];
  }

  // The block of a token, from 0, as the model denoises them; -1: not known. With full
  // attention they begin with the answer, else they lie on a grid from the prompt's start.
  block(i) {
    const size = this.file.block;
    if (!size || this.drawing) return -1;
    const before = this.file.full ? 0 : this.row.n % size;
    return Math.floor((before + i) / size);
  }

  // [first step, last step, tokens] of each block; [] where blocks are not known.
  get blocks() {
    if (!this.file.block || this.drawing) return [];
    const blocks = [];
    this.steps.forEach((step, i) => {
      const block = (blocks[this.block(i)] ??= [step, step, 0]);
      block[0] = Math.min(block[0], step);
      block[1] = Math.max(block[1], step);
      block[2] += 1;
    });
    return blocks;
  }

  // A number of a token, in its own unit; null: not known.
  number(letter, i) {
    const x = this.row[letter]?.[i];
    return x === undefined || x === null ? null : x / 100;
  }
}

// Returns the class of a token's colour: q0 .. q9 of a scale, minus of a signed one.
function colour(mode, answer, i, most) {
  let share, sign = "";
  if (mode === "order") {
    share = answer.last > 1 ? (answer.steps[i] - 1) / (answer.last - 1) : 0;
  } else {
    const x = answer.number(MODES[mode].letter, i);
    if (x === null) return "unknown";
    if (mode === "confidence") share = 1 - x;
    else if (mode === "logprob") share = Math.min(-x / 5, 1);
    else {
      share = most ? Math.abs(x) / most : 0;
      sign = x < 0 ? " minus" : "";
    }
  }
  const level = Math.round(share * (LEVELS - 1));
  return `q${Math.max(0, Math.min(LEVELS - 1, level))}${sign}`;
}

class Canvas {
  // onToken: called with a token's number, or -1, where the pointer is on it.
  constructor(answer, onToken) {
    this.answer = answer;
    this.step = 0;
    this.fresh = [];
    this.differs = -1;
    this.edges = new Set(); // the tokens that begin a block, but for the first
    let block = -1;
    this.tokens = answer.pieces.map((piece, i) => {
      const node = token(piece);
      const here = answer.block(i);
      if (i && here !== block) this.edges.add(i);
      block = here;
      return node;
    });
    const kind = this.tokens.length > LONG ? "canvas long" : "canvas";
    const grid = answer.drawing ? " grid" : "";
    this.node = el("div", { class: kind + grid, dir: "auto", tabindex: 0, role: "img" });
    if (answer.drawing) this.grid();
    for (const node of this.tokens) this.node.append(node);
    if (!this.tokens.length) this.node.append(el("p", { class: "quiet" }, empty(answer.row.e)));
    const index = new Map(this.tokens.map((node, i) => [node, i]));
    const at = (event) => {
      const node = event.target.closest?.(".token");
      return index.has(node) ? index.get(node) : -1;
    };
    this.node.addEventListener("pointerover", (event) => onToken(at(event)));
    this.node.addEventListener("click", (event) => onToken(at(event)));
  }

  // Lays out a drawing row by row, as it was tokenised, over the picture that it became.
  grid() {
    const { side, picture } = this.answer;
    this.node.style.setProperty("--side", side);
    if (picture) this.node.append(image(picture, "", "under"));
  }

  // Colours all tokens. most: where a signed scale ends.
  paint(mode, most) {
    this.node.dataset.mode = mode;
    this.tokens.forEach((node, i) => {
      const { answer } = this;
      const classes = ["token", KINDS[answer.pieces[i][1]], colour(mode, answer, i, most)];
      if (this.edges.has(i)) classes.push("edge");
      if (i === this.differs) classes.push("differs");
      if (answer.steps[i] <= this.step) classes.push("shown");
      if (answer.steps[i] === this.step) classes.push("fresh");
      node.className = classes.filter(Boolean).join(" ");
    });
  }

  // Shows what is written once a step is done; touches what changes alone.
  show(step) {
    const { answer } = this, { starts, tokens } = answer.order;
    const upTo = (s) => starts[Math.min(s, answer.last) + 1];
    for (const i of this.fresh) this.tokens[i].classList.remove("fresh");
    const [from, to] = [upTo(this.step), upTo(step)];
    for (let k = Math.min(from, to); k < Math.max(from, to); k++) {
      this.tokens[tokens[k]].classList.toggle("shown", to > from);
    }
    this.fresh = step > answer.last ? [] : Array.from(tokens.slice(starts[step], starts[step + 1]));
    for (const i of this.fresh) this.tokens[i].classList.add("fresh");
    this.step = step;
    this.node.setAttribute("aria-label", this.label());
  }

  // What is written, for who cannot see it: the beginning of a long answer.
  label() {
    let text = "";
    if (this.answer.drawing) {
      const done = this.answer.steps.filter((step) => step <= this.step).length;
      return `${done} of ${count(this.tokens.length, "code")} drawn`;
    }
    for (let i = 0; i < this.tokens.length && text.length < 1000; i++) {
      const [piece, kind] = this.answer.pieces[i];
      text += this.answer.steps[i] > this.step ? "\u2592" : kind === PLAIN ? piece : "";
    }
    return visible(text) || "nothing written";
  }
}

const KINDS = ["", "special", "part", "id", "code"];

// Returns the element of one token; a line break is marked, and breaks the line.
function token([text, kind]) {
  const node = el("span");
  if (kind === CODE) return node;
  const lines = visible(text).split("\n");
  lines.forEach((line, i) => {
    if (i) node.append(el("i", { class: "break" }), "\n");
    if (line) node.append(line);
  });
  if (text === "" && kind === PLAIN) node.append(el("i", { class: "nothing" }));
  return node;
}

function empty(finished) {
  if (finished === "nan") return "No answer: the model met a number that is not finite.";
  if (finished === "skipped") return "No answer: the prompt was too long.";
  return "An answer without a token.";
}
