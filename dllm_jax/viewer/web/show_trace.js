// The page of `python -m dllm_jax.trace`: what the files are, who won, and the replay.

function describe(file, compared) {
  const { rows } = file, facts = [count(rows.length, "answer")];
  const drawn = rows.some((row) => row.p !== undefined); // the others are skipped
  const graded = rows.filter((row) => row.o !== undefined);
  if (graded.length) facts.push(`${percent(mean(graded.map((row) => Number(row.o))))} right`);
  const told = rows.filter((row) => row.f);
  if (told.length && !compared) {
    const tokens = told.reduce((sum, row) => sum + row.t.length, 0);
    const forwards = told.reduce((sum, row) => sum + row.f, 0);
    facts.push(`${fixed(tokens / forwards, 2)} ${drawn ? "codes" : "tokens"} per forward`);
  }
  if (file.block && !drawn) facts.push(`blocks of ${file.block}`);
  return facts.join(" \u00b7 ");
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
