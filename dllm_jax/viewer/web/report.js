// The page of `python -m dllm_jax.report`: one run, or two side by side.

function section(title, ...children) {
  const parts = children.flat().filter(Boolean);
  return parts.length ? el("section", { class: "part" }, el("h2", {}, title), parts) : null;
}

function grid(head, rows, classes = "") {
  const cell = (tag, x) => el(tag, {}, x instanceof Node ? x : String(x ?? ""));
  return el("div", { class: "wide" }, el("table", { class: classes },
    head.length ? el("thead", {}, el("tr", {}, head.map((x) => cell("th", x)))) : null,
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((x, i) => cell(i ? "td" : "th", x)))))));
}

function named(runs, i) {
  return runs.length > 1 ? badge(i) : null;
}

// Panels of both runs by their titles, each line with its run.
function merged(runs) {
  const panels = new Map();
  runs.forEach((run, i) => run.panels.forEach(({ title, log, lines }) => {
    if (!panels.has(title)) panels.set(title, { title, log, lines: [] });
    panels.get(title).lines.push(...lines.map((line) => ({ ...line, run: i })));
  }));
  return [...panels.values()];
}

function headline(run) {
  if (!run.evals.length) return null;
  const [first, last] = [run.evals[0], run.evals.at(-1)];
  const told = (row) => (row[1] === null ? "none judged" : percent(row[1]));
  const spread = (row) => (row[2] === null ? "" : `${percent(row[2])} to ${percent(row[3])}`);
  return el("p", { class: "headline" }, "Held-out accuracy ", el("b", {}, told(first)),
    " \u2192 ", el("b", {}, told(last)),
    last[2] === null ? "" : el("span", { class: "quiet" }, ` (95\u202f%: ${spread(last)})`),
    last[4] === null ? "" : [", tokens per forward ", el("b", {}, fixed(first[4], 2)), " \u2192 ",
      el("b", {}, fixed(last[4], 2))]);
}

// rows: of run.evals, or of run.settings; what: what the first of each says.
function evaluations(rows, what, run, runs) {
  if (!rows.length) return null;
  const cells = rows.map(([name, share, low, high, speed, length]) => [
    typeof name === "number" ? grouped(name) : name, share === null ? "\u2013" : percent(share),
    low === null ? "\u2013" : `${percent(low)} to ${percent(high)}`, fixed(speed, 2), fixed(length, 1)]);
  const head = [what, "accuracy", "95\u202f% interval", "tokens per forward", "answer length"];
  return el("div", { class: "half" },
    runs.length > 1 ? el("h3", {}, named(runs, runs.indexOf(run)), run.name) : null, grid(head, cells, "numbers"));
}

function happened(run, runs, i) {
  const attempts = run.attempts.map(([start, end, host, commit, ended], k) =>
    [`attempt ${k + 1}`, ended, start, end || "\u2013", host, commit.slice(0, 12)]);
  return [runs.length > 1 ? el("h3", {}, named(runs, i), run.name) : null,
    attempts.length ? grid(["", "ended", "from", "to", "host", "commit"], attempts) : null,
    run.sums.length ? grid([], run.sums.map(([text, n]) => [text, grouped(n)]), "numbers") : null,
    run.events.length ? el("pre", { class: "log" }, visible(run.events.join("\n")))
      : el("p", { class: "quiet" }, "No warning in run.log.")];
}

function configuration(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
  const values = (key) => runs.map((run) => run.config[key]);
  const differs = runs.length > 1
    ? (key) => values(key)[0] !== values(key)[1]
    : (key) => runs[0].defaults[key] !== runs[0].config[key];
  const rows = keys.filter(differs).map((key) => [el("code", {}, key),
    ...(runs.length > 1 ? [] : [runs[0].defaults[key] ?? "\u2013"]), ...values(key).map((x) => x ?? "\u2013")]);
  const head = ["key", ...(runs.length > 1 ? runs.map((_, i) => badge(i)) : ["default", "this run"])];
  return rows.length ? grid(head, rows, "keys-table") : el("p", { class: "quiet" }, "None differs.");
}

function showReport({ runs, samples, title, summary }) {
  const two = runs.length > 1;
  const main = document.getElementById("page");
  const head = runs.map((run, i) => el("div", {}, el("h1", {}, named(runs, i), run.name), headline(run),
    el("dl", { class: "facts-list" }, run.facts.map(([name, x]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, x))))));
  const scores = runs.filter((run) => run.scores.length).map((run) =>
    grid(["eval.json", named(runs, runs.indexOf(run)) ?? "", "95 %"],
      run.scores.map(([name, x, low, high]) =>
        [name, short(x), low === null ? "" : `${short(low)} \u2013 ${short(high)}`]), "numbers"));
  const time = runs.filter((run) => run.phases.steps.length).map((run) =>
    [two ? el("h3", {}, named(runs, runs.indexOf(run)), run.name) : null, timeChart(run.phases)]);
  // What there is nothing of, such as curves of an evaluation's folder, has no heading.
  const charts = merged(runs).map((panel) => new Chart(panel, runs.length).node);
  const held = runs.flatMap((run) => [evaluations(run.evals, "step", run, runs),
    evaluations(run.settings, "setting", run, runs)]).filter(Boolean);
  const events = section("What happened", runs.flatMap((run, i) => happened(run, runs, i)));
  main.append(...[el("header", { class: two ? "top halves" : "top" }, head),
    section("Curves", charts.length ? el("div", { class: "charts" }, charts) : null),
    section("Evaluations", held.length ? el("div", { class: two ? "halves" : "" }, held) : null,
      scores, summary ? versus(summary) : null),
    section("Where the time went", time.flat()),
    events,
    section(two ? "Keys that differ" : "Keys that differ from their defaults", configuration(runs)),
  ].filter(Boolean));
  if (!samples) return;
  const view = new Trace(samples);
  main.insertBefore(section(title, view.node), events);
}

showReport(pageData());
