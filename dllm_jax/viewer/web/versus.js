// What two files of answers differ by: what each measure is in both files, and the difference with its interval.
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
  const ungraded = wins ? problems - wins[0] - wins[1] - wins[2] : 0;
  return el("section", { class: "versus" },
    el("table", {}, el("thead", {}, el("tr", {}, head.map((x) => el("th", { scope: "col" }, x)))),
      el("tbody", {}, rows)),
    el("p", { class: "quiet" }, `${count(problems, "prompt")} in both files. `,
      wins ? `B is ahead on ${wins[1]}, A on ${wins[0]}, ${wins[2]} the same. ` : "",
      ungraded ? `${ungraded} not graded in both. ` : "",
      "The interval is the paired bootstrap\u2019s over prompts. ",
      measures.some(([name]) => name === "tokens per forward")
        ? "Tokens per forward are those of each answer, averaged; elsewhere they are all over all." : ""));
}
