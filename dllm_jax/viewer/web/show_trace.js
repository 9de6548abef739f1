// The page of `python -m dllm_jax.trace`: what the files are, who won, and the replay.

function describe(file, compared) {
  const { rows } = file, facts = [count(rows.length, "answer")];
  const graded = rows.filter((row) => row.r !== undefined);
  if (graded.length) facts.push(`${percent(mean(graded.map((row) => Number(row.r >= 1))))} right`);
  const told = rows.filter((row) => row.f);
  if (told.length && !compared) {
    const tokens = told.reduce((sum, row) => sum + row.t.length, 0);
    const forwards = told.reduce((sum, row) => sum + row.f, 0);
    facts.push(`${fixed(tokens / forwards, 2)} tokens per forward`);
  }
  if (file.block) facts.push(`blocks of ${file.block}`);
  return facts.join(" \u00b7 ");
}

// A table: what each measure is in both files, and the difference with its interval.
function versus(summary) {
  const { measures, wins, problems } = summary;
  const scale = { right: [100, 1], tokens: [1, 1] };
  const form = (name, x, show) => {
    const [times, digits] = scale[name] ?? [1, 2];
    return show(times * x, digits);
  };
  const rows = measures.map(([name, a, b, gained, low, high]) => {
    const sure = low !== null && (low > 0 || high < 0);
    return el("tr", {}, el("th", { scope: "row" }, name === "right" ? "right, %" : name),
      el("td", {}, form(name, a, fixed)), el("td", {}, form(name, b, fixed)),
      el("td", { class: sure ? "sure" : "" }, form(name, gained, signed)),
      el("td", { class: "quiet" }, low === null ? "\u2013"
        : `${form(name, low, signed)} to ${form(name, high, signed)}`));
  });
  const head = ["", badge(0), badge(1), "B \u2212 A", "95\u202f% interval"];
  const same = wins ? problems - wins[0] - wins[1] : 0;
  return el("section", { class: "versus" },
    el("table", {}, el("thead", {}, el("tr", {}, head.map((x) => el("th", { scope: "col" }, x)))),
      el("tbody", {}, rows)),
    el("p", { class: "quiet" }, `${count(problems, "prompt")} in both files. `,
      wins ? `B is ahead on ${wins[1]}, A on ${wins[0]}, ${same} the same. ` : "",
      "The interval is the paired bootstrap\u2019s over prompts."));
}

function keysOf() {
  const keys = [["\u2190 \u2192", "a step"], ["space", "play"], ["home end", "first, last step"],
    ["[ ]", "another answer"], ["c", "colour"], ["/", "search"]];
  return el("footer", { class: "keys" }, keys.map(([key, does]) =>
    el("span", {}, key.split(" ").map((k) => el("kbd", {}, k)), does)));
}

function showTrace(data) {
  const { files, pairs, summary } = data;
  const head = files.map((file, side) => el("div", { class: "file" },
    el(files.length > 1 ? "h2" : "h1", {}, files.length > 1 ? badge(side) : null, file.name),
    el("p", { class: "quiet" }, describe(file, Boolean(pairs)), file.model ? ` \u00b7 ${file.model}` : ""),
    file.notice ? el("p", { class: "notice" }, file.notice) : null));
  const view = new Trace({ files, pairs });
  document.getElementById("page").append(
    el("header", { class: "top" }, el("div", { class: "files" }, head),
      summary ? versus(summary) : null),
    view.node, keysOf());
  view.buttons.get(0)?.scrollIntoView({ block: "nearest" });
}

showTrace(pageData());
