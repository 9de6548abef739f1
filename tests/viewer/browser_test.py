"""The pages in a browser: keys, slider, comparison, no complaint, and no text that acts.

They are skipped where Debian's chromium, its driver or selenium are missing.
"""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from dllm_jax import data, images, report, trace
from dllm_jax.rl.rewards import scenes
from dllm_jax.viewer import page, traces
from tests.viewer.common import FULL, MODEL, answer, write

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium with its driver"
)

HOSTILE = {
    "script": "</script><script>document.title='gone'</script>",
    "image": "<img src=x onerror=\"document.title='gone'\">",
    "emoji": "a🙂b 👩‍👩‍👧",
    "hebrew": "שלום עולם",
    "override": "abc \u202e\u2066 def",
    "control": "a\x00\x1b[31mb",
    "template": "{{data}} ${x} \\u003c \u2028",
    "empty": "",
    "long": "wörd " * 5_000,
}


@pytest.fixture(scope="module")
def driver():
    """A browser without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    browser = webdriver.Chrome(options=options, service=service)
    yield browser
    browser.quit()


class Page:
    """An open page; leaving it asserts that the browser had no complaint."""

    def __init__(self, driver, file, width: int):
        self.driver, self.file, self.width = driver, file, width

    def __enter__(self):
        size = {"width": self.width, "height": 800, "deviceScaleFactor": 1}
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", size | {"mobile": self.width < 500}
        )
        self.driver.get(self.file.as_uri())
        ready = "return document.querySelectorAll('main > *').length > 1"
        WebDriverWait(self.driver, 60).until(lambda _: self.js(ready))
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            assert self.driver.get_log("browser") == []

    def js(self, script: str, *arguments):
        """Returns what a function body returns in the page."""
        return self.driver.execute_script(script, *arguments)

    def key(self, *names: str):
        """Presses keys, one after the other."""
        for name in names:
            self.js(
                "document.body.dispatchEvent(new KeyboardEvent('keydown',"
                " {key: arguments[0], bubbles: true, cancelable: true}))",
                name,
            )

    def shown(self) -> list[str]:
        """Returns the tokens that are written, on all canvases."""
        return self.js(
            "return [...document.querySelectorAll('.canvas .shown')].map(x => x.textContent)"
        )

    def fits(self) -> bool:
        """Returns whether nothing is wider than the page."""
        return self.js("return document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture(params=[1280, 360])
def opened(driver, tmp_path, request):
    """Returns a function that opens a page of some data, at a desk's and a phone's width."""

    def of(kind, content, title="Trace"):
        file = tmp_path / "page.html"
        file.write_text(page.page(title, kind, content))
        return Page(driver, file, request.param)

    return of


@pytest.fixture(scope="module")
def tok():
    """The bundled model's tokenizer."""
    return data.tokenizer(MODEL)


def by_hand(texts, **fields) -> dict:
    """Returns the page's data of one answer to each text, a token for every four signs."""
    made = {
        "name": "x",
        "model": "",
        "block": 4,
        "notice": "",
        "pieces": [],
        "rows": [],
    }
    for text in texts:
        parts = [text[i : i + 4] for i in range(0, len(text), 4)]
        first = len(made["pieces"])
        made["pieces"] += [[part, 0, i] for i, part in enumerate(parts)]
        count = len(parts)
        row = {"q": text[:200], "n": 3, "t": [*range(first, first + count)]}
        row |= {"s": [1] * count, "l": [-5] * count, "c": [95] * count, "e": "stop"}
        made["rows"].append(row | fields)
    return {"files": [made], "pairs": None, "summary": None}


def test_replay_by_keys_slider_and_buttons(opened, tmp_path, tok):
    ids = [8, 31, 25, 32, 102, 2]  # \boxed{607} and an end, written from right to left
    rows = [answer(ids, reward=1.0), answer(ids[:3], reward=0.0, prompt_ids=[4])]
    file = traces.read(str(write(tmp_path / "x.jsonl", rows)))
    content = {"files": [traces.packed(file, tok)], "pairs": None, "summary": None}
    with opened(page.TRACE, content) as view:
        assert view.fits()
        assert "".join(view.shown()) == "\\boxed{607}<|im_end|>"
        view.key("Home")
        assert view.shown() == []
        view.key("ArrowRight")
        assert view.shown() == ["<|im_end|>"]
        view.key("ArrowRight", "ArrowRight", "ArrowLeft")
        assert view.shown() == ["}", "<|im_end|>"]
        view.js(
            "const s = document.querySelector('input[type=range]'); s.value = 4;"
            "s.dispatchEvent(new Event('input'))"
        )
        assert len(view.shown()) == 4
        assert (
            view.js("return document.querySelector('.counter').textContent")
            == "4\u2009/\u20096"
        )
        view.js("document.querySelector('[aria-label=\"To the end\"]').click()")
        assert len(view.shown()) == 6
        view.key("]")
        assert len(view.shown()) == 3
        view.key("[")
        assert len(view.shown()) == 6
        modes = []
        for _ in range(3):
            view.key("c")
            modes.append(
                view.js("return document.querySelector('.canvas').dataset.mode")
            )
        assert modes == ["confidence", "logprob", "order"]
        view.js("document.querySelectorAll('.chip')[2].click()")  # wrong
        assert view.js("return document.querySelectorAll('.item').length") == 1
        view.js("document.querySelector('.canvas .token').click()")
        facts = view.js("return document.querySelector('.facts').textContent")
        assert "step 6 of 6" in facts and "confidence 50" in facts


def test_playing_ends_at_the_last_step(opened):
    with opened(page.TRACE, by_hand(["abcdefgh"])) as view:
        view.key(" ")
        assert view.shown() == []
        view.driver.set_script_timeout(20)
        view.driver.execute_async_script(
            "const done = arguments[0], wait = setInterval(() => {"
            "if (document.querySelectorAll('.canvas .shown').length === 2) {"
            "clearInterval(wait); done(); }}, 20)"
        )
        name = "return document.querySelector('.play').getAttribute('aria-label')"
        assert view.js(name) == "Play"


@pytest.mark.parametrize(
    ("model", "edges", "sizes"), [(FULL, [4], [4, 4]), (MODEL, [1, 5], [1, 4, 3])]
)
def test_blocks_lie_where_the_model_denoised_them(
    opened, tmp_path, model, edges, sizes
):
    """Behind a prompt of 3 tokens: with full attention they begin with the answer."""
    told = {"model": {"path": str(model)}, "sampler": {"block": 4}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    rows = [answer([8, 31, 25, 32, 102, 30, 30, 2])]
    file = traces.read(str(write(tmp_path / "x.jsonl", rows)))
    made = traces.packed(file, data.tokenizer(model))
    content = {"files": [made], "pairs": None, "summary": None}
    with opened(page.TRACE, content) as view:
        found = "[...document.querySelectorAll('.canvas .token')]"
        drawn = f"return {found}.flatMap((x, i) => x.matches('.edge') ? [i] : [])"
        assert view.js(drawn) == edges
        view.js(f"{found}[4].click()")
        facts = view.js("return document.querySelector('.facts').textContent")
        assert "block 2" in facts
        bars = "return [...document.querySelectorAll('.band')].map(x => x.textContent)"
        told = [text.split(", ")[1] for text in view.js(bars)]
        assert told == [f"{size} token{'s' * (size > 1)}" for size in sizes]


def test_two_files_side_by_side(opened, tmp_path):
    ids = [8, 31, 25]
    first = [answer(ids, prompt_ids=[i], reward=0.0) for i in range(3)]
    second = [
        answer([8, 30, 25], prompt_ids=[i], reward=float(i > 0)) for i in range(3)
    ]
    paths = [
        write(tmp_path / f"{i}.jsonl", rows) for i, rows in enumerate((first, second))
    ]
    content = trace.content([traces.read(str(path)) for path in paths], str(MODEL))
    with opened(page.TRACE, content) as view:
        assert view.fits()
        assert view.js("return document.querySelectorAll('.canvas').length") == 2
        assert len(view.shown()) == 6
        told = view.js("return document.querySelector('.versus').textContent")
        assert "66.7" in told and "B is ahead on 2, A on 0, 1 the same" in told
        differs = (
            "return [...document.querySelectorAll('.differs')].map(x => x.textContent)"
        )
        assert view.js(differs) == ["6", "5"]
        view.js("document.querySelectorAll('.chip')[1].click()")
        assert view.js("return document.querySelectorAll('.item').length") == 2


CUT = {  # the pieces of two answers, and those in which they differ first
    "elsewhere": (["he", "llo", " x"], ["hel", "lo", " y!"], [" x", " y!"]),
    "nowhere": (["he", "llo"], ["hello"], []),
    "where one ends": (["he", "llo"], ["hello", " you"], [" you"]),
}


@pytest.mark.parametrize("name", CUT)
def test_other_tokenizers_cut_the_same_text_elsewhere(opened, name):
    sides = [by_hand([""])["files"][0] for _ in range(2)]
    for side, texts in zip(sides, CUT[name], strict=False):
        side["pieces"] = [[text, 0, i] for i, text in enumerate(texts)]
        side["rows"][0] |= {"t": [*range(len(texts))], "s": [1] * len(texts), "q": "?"}
        side["rows"][0] |= {"l": [-5] * len(texts), "c": [95] * len(texts)}
    with opened(
        page.TRACE, {"files": sides, "pairs": [[0, 0]], "summary": None}
    ) as view:
        differs = (
            "return [...document.querySelectorAll('.differs')].map(x => x.textContent)"
        )
        assert view.js(differs) == CUT[name][2]


def test_what_is_not_all_is_never_called_so(opened):
    with opened(page.TRACE, by_hand(["x"])) as view:
        told = {1: "100", 1 - 1e-12: "100", 0.9999: ">99.9", 0.998: "99.8", 0.5: "50"}
        told |= {0.015: "1.5", 0.0004: "<0.1", 1e-17: "0", 0: "0"}
        for share, text in told.items():
            assert view.js("return percent(arguments[0])", share) == f"{text}\u202f%"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_shown_and_does_nothing(opened, name):
    text = HOSTILE[name]
    with opened(page.TRACE, by_hand([text, text], g=text[:50]), title="safe") as view:
        assert view.driver.title == "safe"
        assert view.fits()
        assert (
            view.js("return document.querySelectorAll('main script, main img').length")
            == 0
        )
        shown = "".join(view.shown())
        expected = view.js("return visible(arguments[0])", text)
        assert shown == expected
        if name in ("script", "image", "emoji", "hebrew", "long"):
            assert shown == text
        if name == "override":
            assert "\u202e" not in shown and "\u2039202E\u203a" in shown
        view.key("Home", "c", "End", " ", " ")
    assert view.driver.title == "safe"


def test_many_answers_open_at_once(opened):
    texts = [f"{i} " + "word " * 400 for i in range(200)]
    with opened(page.TRACE, by_hand(texts)) as view:
        assert view.js("return document.querySelectorAll('.item').length") == 200


def test_answers_to_one_prompt_stand_below_it(opened):
    made = by_hand(
        ["one", "one", "", "", "two"]
    )  # of two prompts skipped nothing is known
    made["files"] += by_hand(["two"])["files"]
    with opened(page.TRACE, made) as view:
        heads = "return [...document.querySelectorAll('h3')].map((x) => x.textContent)"
        assert view.js(heads) == ["one"]


@pytest.fixture
def run(tmp_path):
    """The folder of a run that ended badly once, with hostile words in its log."""
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    rows = []
    for step in range(41):
        row = {"step": step, "reward": step / 40, "updates_skipped": float(step == 7)}
        row |= {"seconds/rollout": 1.0, "seconds/update": 2.0} if step else {}
        row |= {"heldout_accuracy": step / 40} if step % 10 == 0 else {}
        rows.append(row)
    write(folder / "metrics.jsonl", rows)
    for step in (1, 40):
        write(folder / "samples" / f"step_{step:06d}.jsonl", [answer(reward=1.0)])
    cfg = {"method": "rl", "seed": 1, "model": {"path": str(MODEL)}}
    cfg |= {"eval": {"problems": 64}, "sampler": {"block": 4}}
    (folder / "config.json").write_text(json.dumps(cfg))
    attempts = [{"start": "a", "ended": "killed <b>"}, {"start": "b", "ended": "done"}]
    told = {"attempts": attempts, "defaults": cfg | {"seed": 0}}
    (folder / "run.json").write_text(json.dumps(told))
    (folder / "run.log").write_text("t warning: </script><b>\nt step 1\n")
    return folder


@pytest.mark.parametrize("two", [False, True])
def test_the_report_shows_what_happened(opened, run, two, tmp_path):
    folders = [str(run)]
    if two:
        shutil.copytree(run, tmp_path / "other")
        cfg = json.loads((run / "config.json").read_text()) | {"seed": 5}
        (tmp_path / "other" / "config.json").write_text(json.dumps(cfg))
        folders.append(str(tmp_path / "other"))
    with opened(page.REPORT, report.content(folders)) as view:
        assert view.fits()
        text = view.js("return document.body.textContent")
        for words in (
            "killed <b>",
            "warning: </script><b>",
            "updates of the policy skipped",
        ):
            assert words in text
        assert "t step 1" not in text
        keys = "return [...document.querySelectorAll('.keys-table td')].map(x => x.textContent)"
        assert view.js(keys) == (["1", "5"] if two else ["0", "1"])
        charts = view.js("return document.querySelectorAll('.chart').length")
        assert charts == 1  # accuracy; nothing else has data
        assert view.js("return document.querySelectorAll('.canvas').length") == 2


def test_the_report_shows_what_was_drawn_and_looked_at(opened, run, tmp_path):
    """Of both steps a drawing, and an answer about an image file and one that is no such."""
    captions = ("two red circles on the left", "one blue square on the right")
    rng = np.random.default_rng(0)
    drawn, shown = (scenes.draw(scenes.ALL[x], rng) for x in captions)
    (tmp_path / "data").mkdir()
    Image.fromarray(shown).save(tmp_path / "data" / "a.png")
    cfg = json.loads((run / "config.json").read_text())
    cfg["data"] = {"train": str(tmp_path / "data" / "train.jsonl")}
    (run / "config.json").write_text(json.dumps(cfg))
    outside = {"file": str(tmp_path / "</script><b>.png"), "mark": "0", "first_row": 0}
    there = {
        "file": str(tmp_path / "data" / "a.png"),
        "mark": images.mark(shown),
        "first_row": 0,
    }
    first = answer(range(16), question=captions[0], picture=images.embedded(drawn))
    first |= {"step_map": rounds(4, 2), "prompt_ids": [7]}
    second = answer(question="What is this?", images=[there, outside], reward=1.0)
    for step in (1, 40):
        write(run / "samples" / f"step_{step:06d}.jsonl", [first, second])
    kinds = "return [...document.querySelectorAll('.canvas')].map(x => x.className)"
    sizes = (
        "return [...document.querySelectorAll(arguments[0])].map(x => x.naturalWidth)"
    )
    with opened(page.REPORT, report.content([str(run)])) as view:
        assert view.fits()
        assert [("grid" in x) for x in view.js(kinds)] == [True, True]
        assert view.js(sizes, ".done") == [64, 64] and view.js(sizes, ".seen") == []
        assert captions[0] in view.js("return document.body.textContent")
        view.js("document.querySelector('.canvas').scrollIntoView({block: 'center'})")
        view.key("]")
        assert view.fits()
        assert [("grid" in x) for x in view.js(kinds)] == [False, False]
        assert {*view.js(sizes, ".seen")} == {64} and view.js(sizes, ".done") == []
        told = view.js("return document.querySelector('.asked').textContent")
        assert "What is this?" in told
        assert "outside of" in told and "</script><b>.png" in told
        assert view.js("return document.querySelectorAll('main script').length") == 0


def test_two_evaluations_are_compared_in_pairs(opened, tmp_path):
    folders = []
    for name, right in (("a", 1), ("b", 3)):
        folder = tmp_path / name
        folder.mkdir()
        rows = [answer(prompt_ids=[i], reward=float(i < right)) for i in range(4)]
        write(folder / "eval.jsonl", rows)
        (folder / "eval.json").write_text(json.dumps({"accuracy": right / 4}))
        (folder / "run.json").write_text('{"attempts": [], "defaults": {}}')
        folders.append(str(folder))
    with opened(page.REPORT, report.content(folders)) as view:
        told = view.js("return document.querySelector('.versus').textContent")
        assert "+50.0" in told and "B is ahead on 2, A on 0, 2 the same" in told
        assert view.js("return document.querySelectorAll('.canvas').length") == 2


def test_what_there_is_nothing_of_has_no_heading(opened, tmp_path):
    """Such as of a run that has just begun."""
    (tmp_path / "run.json").write_text('{"attempts": [], "defaults": {}}')
    with opened(page.REPORT, report.content([str(tmp_path)])) as view:
        found = "return [...document.querySelectorAll('h2')].map(x => x.textContent)"
        assert view.js(found) == [
            "What happened",
            "Keys that differ from their defaults",
        ]


def test_an_evaluation_that_nobody_judged_has_no_accuracy(opened, tmp_path):
    lost = {"heldout_problems": 8, "heldout_graded_timeouts": 8}
    rows = [{"step": 0, "heldout_accuracy": 0.0} | lost, {"step": 1, **lost}]
    rows[1] |= {"heldout_accuracy": 0.5, "heldout_graded_timeouts": 0}
    write(tmp_path / "metrics.jsonl", rows)
    with opened(page.REPORT, report.content([str(tmp_path)])) as view:
        told = view.js("return document.querySelector('.headline').textContent")
        assert told.startswith("Held-out accuracy none judged → 50")


def test_a_sweep_has_a_row_for_each_setting(opened, tmp_path):
    (tmp_path / "run.json").write_text('{"attempts": [], "defaults": {}}')
    for value, told in (("0.5", '{"accuracy": 0.25}'), ("1", "{}")):
        (part := tmp_path / f"threshold={value}").mkdir()
        (part / "eval.json").write_text(told)
        write(part / "eval.jsonl", [answer(question="<b>x</b>")])
    with opened(page.REPORT, report.content([str(tmp_path)])) as view:
        found = "return [...document.querySelectorAll('h2')].map(x => x.textContent)"
        title = "Answers of the first and the last setting"
        assert view.js(found)[:2] == ["Evaluations", title]
        rows = view.js(
            "return [...document.querySelectorAll('.half tbody tr')]"
            ".map(x => [...x.children].slice(0, 3).map(y => y.textContent))"
        )
        assert rows == [
            ["threshold=0.5", "25\u202f%", "\u2013"],
            ["threshold=1", "\u2013", "\u2013"],
        ]
        assert view.fits()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("runs", [1, 2])
def test_no_two_lines_of_a_chart_look_the_same(opened, run, runs, theme):
    names = ["heldout_accuracy", "accuracy", "reward"]
    if runs == 1:
        names += [f"heldout_{x}_accuracy" for x in "abcdef"]
    rows = [
        {"step": step} | {name: (i + step) / 20 for i, name in enumerate(names)}
        for step in range(4)
    ]
    write(run / "metrics.jsonl", rows)
    with opened(page.REPORT, report.content([str(run)] * runs)) as view:
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        view.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        looks = view.js(
            "return [...document.querySelectorAll('.line path')].map(getComputedStyle)"
            ".map(x => `${x.stroke} ${x.strokeDasharray}`)"
        )
        keys = view.js(
            "return [...document.querySelectorAll('.chart .key')].map(getComputedStyle)"
            ".map(x => `${x.color} ${x.boxShadow} ${x.borderRadius}`)"
        )
        view.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        assert len(looks) == len({*looks}) == len({*keys}) == runs * len(names)


def test_a_curve_of_zeros_has_no_axis_below_zero(opened, run):
    rows = [{"step": i, "accuracy": 0.0} for i in range(4)]
    write(run / "metrics.jsonl", rows)
    with opened(page.REPORT, report.content([str(run)])) as view:
        drawn = "return document.querySelector('.chart svg').textContent"
        assert "1" in view.js(drawn) and "\u2212" not in view.js(drawn)


def test_the_number_of_the_last_step_is_inside_of_its_chart(opened, run):
    rows = [{"step": 20_000 * i, "kl": i / 2} for i in range(6)]
    write(run / "metrics.jsonl", rows)
    with opened(page.REPORT, report.content([str(run)])) as view:
        number, chart = view.js(
            "const svg = document.querySelector('.chart svg');"
            "return [[...svg.querySelectorAll('.tick.x')].at(-1), svg]"
            ".map(x => x.getBoundingClientRect().right)"
        )
        assert number <= chart
        assert "100\u202f000" in view.js("return document.body.innerText")


def test_what_20_000_steps_tell_can_be_seen(opened, run):
    """A mean that is a line and no band, both extremes of each bar, and few elements."""
    rows = [
        {"step": step, "kl": step % 2 + (step == 7_777), "seconds/rollout": step % 2}
        for step in range(1, 20_001)
    ]
    write(run / "metrics.jsonl", rows)
    with opened(page.REPORT, report.content([str(run)])) as view:
        heights = view.js(
            "return [...document.querySelectorAll('.chart path[d]')].slice(1, 3)"
            ".map(x => x.getAttribute('d').match(/[\\d.]+(?=L|$)/g).map(Number))"
        )
        raw, mean = map(np.array, heights)
        assert len(raw) == len(mean) == 1000  # two of each of 500 bars
        assert (raw == raw.min()).sum() == 1 and np.ptp(mean[20:-20]) < 1
        bars = view.js(
            "return [...document.querySelectorAll('.time rect')].map(x => x.textContent)"
        )
        told = "mean of steps 7\u202f761 to 7\u202f800: rollout 0.500 s of 0.500 s"
        assert len(bars) == 500 and bars[194] == told
        text = view.js("return document.querySelector('.time').textContent")
        assert "10\u202f000 s in 20\u202f000 steps" in text


def test_a_metric_that_moves_by_rounding_alone_has_a_scale(opened, run):
    metrics = {"accuracy": (0.1, 0.1 + 2**-56), "kl": (-0.7, -0.7 - 2**-53)}
    metrics |= {"response_length": (16.0, 16.0 + 2**-48), "entropy": (1 / 3, 1 / 3)}
    rows = [
        {"step": i} | {name: pair[i % 2] for name, pair in metrics.items()}
        for i in range(4)
    ]
    write(run / "metrics.jsonl", rows)
    with opened(page.REPORT, report.content([str(run)])) as view:
        told = view.js(
            "return [...document.querySelectorAll('.chart svg')]"
            ".map(x => [...x.querySelectorAll('.tick.y')].map(t => t.textContent))"
        )
        assert len(told) == 4
        assert all(1 < len({*ticks}) == len(ticks) < 10 for ticks in told)


@pytest.mark.parametrize("value", [1e-3, 1e-6, 3.05e-4, 123_456.0])
def test_the_numbers_of_an_axis_are_whole_and_differ(opened, run, value):
    rows = [{"step": i, "learning_rate": value} for i in range(3)]
    write(run / "metrics.jsonl", rows)
    with opened(page.REPORT, report.content([str(run)])) as view:
        found = view.js(
            "const svg = document.querySelector('.chart svg');"
            "return [...svg.querySelectorAll('.tick.y')].map(x => [x.textContent,"
            " x.getBoundingClientRect().left - svg.getBoundingClientRect().left])"
        )
        texts, places = zip(*found, strict=True)
        told = [float(x.replace("\u2212", "-").replace("\u202f", "")) for x in texts]
        apart = np.diff(told)
        np.testing.assert_allclose(apart, apart[0], rtol=1e-3)  # as the lines are
        assert apart[0] > 0 and min(places) >= 0


def rounds(side: int, most: int) -> list[int]:
    """Returns the steps of a drawing's codes, from its middle outwards."""
    middle = (side - 1) / 2
    away = [
        max(abs(y - middle), abs(x - middle)) for y in range(side) for x in range(side)
    ]
    return [1 + round((most - 1) * d / middle) for d in away]


def test_a_drawing_is_a_grid_that_fills(opened, tmp_path):
    rgb = scenes.draw(
        scenes.ALL["two red circles on the left"], np.random.default_rng(0)
    )
    drawn = answer(
        range(300, 364), picture=images.embedded(rgb), question="two red circles"
    )
    drawn |= {"step_map": rounds(8, 4), "reward": 1.0}
    rows = [drawn, drawn | {"reward": 0.0}]
    file = traces.read(str(write(tmp_path / "x.jsonl", rows)))
    packed = traces.packed(file, None, block=4)  # of the checkpoint's texts
    content = {"files": [packed], "pairs": None, "summary": None}
    with opened(page.TRACE, content) as view:
        assert view.fits()
        assert "blocks of" not in view.js("return document.body.innerText")
        columns = "return getComputedStyle(document.querySelector('.grid')).gridTemplateColumns"
        assert len(view.js(columns).split()) == 8
        boxes = view.js(
            "return ['.grid', '.done'].map(x => document.querySelector(x))"
            ".map(x => x.getBoundingClientRect()).map(x => [x.width, x.height])"
        )
        for width, height in boxes:  # both are squares of one size
            assert abs(width - height) <= 1 and abs(width - boxes[0][0]) <= 1
        assert view.js("return document.querySelector('.done').naturalWidth") == 64
        assert len(view.shown()) == 64
        view.key("Home", "ArrowRight")
        assert len(view.shown()) == 4  # the middle
        seen = []
        for _ in range(3):
            seen.append(view.js("return document.querySelector('.grid').dataset.mode"))
            view.key("c")
        assert seen == ["order", "confidence", "logprob"]
        assert (
            view.js("return document.querySelector('.grid').dataset.mode") == "picture"
        )
        under = "return getComputedStyle(document.querySelectorAll('.grid .token')[arguments[0]])"
        clear = "rgba(0, 0, 0, 0)"  # in a moment: colours change smoothly
        WebDriverWait(view.driver, 20).until(
            lambda _: view.js(under + ".backgroundColor", 27) == clear
        )
        assert view.js(under + ".backgroundColor", 0) != clear
        uncovered = "return getComputedStyle(document.querySelector('.under')).display"
        assert view.js(uncovered) == "block"
        view.js("document.querySelectorAll('.grid .token')[9].click()")
        facts = view.js("return document.querySelector('.facts').textContent")
        assert "row 2" in facts and "column 2" in facts and "id 309" in facts
        assert view.js("return document.querySelectorAll('.thumb').length") == 2


def test_what_a_model_looked_at_stands_beside_the_question(opened, tmp_path):
    rgb = scenes.draw(
        scenes.ALL["one blue square on the right"], np.random.default_rng(1)
    )
    Image.fromarray(rgb).save(tmp_path / "a.png")
    there = {"file": str(tmp_path / "a.png"), "mark": images.mark(rgb), "first_row": 0}
    lost = {"file": str(tmp_path / "<b>.png"), "mark": "0", "first_row": 9}
    row = answer(question="What is this?", images=[there, lost])
    file = traces.read(str(write(tmp_path / "x.jsonl", [row])))
    content = {"files": [traces.packed(file, None)], "pairs": None, "summary": None}
    with opened(page.TRACE, content) as view:
        assert view.fits()
        assert view.js("return document.querySelector('.seen').naturalWidth") == 64
        told = view.js("return document.querySelector('.asked').textContent")
        assert "<b>.png" in told and "No such file" in told and "What is this?" in told
        assert view.js("return document.querySelectorAll('.grid').length") == 0
