"""The status page in headless Chromium, Debian's; skipped where there is none."""

import html
import os
import re
import shutil
import subprocess
from itertools import pairwise

import pytest

from serving.cli.main import main
from tests.serving.cli.status_server import reader, status, status_server, status_with, times

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
# Virtual time: the page's seconds pass as fast as its requests are answered. Tests give fewer answers than that: the
# server then repeats the last.
VIRTUAL_MS = 8000
BY = "\N{MULTIPLICATION SIGN}"
ODD_NAMES = ["<img src=x onerror=document.title=1>", "</script><b>x</b>", '"&quot;', "a" * 120]


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Open a page, let time pass, and return the DOM."""
    # A new profile for each page would take a quarter more processor time. A page keeps nothing in it.
    profile = f"--user-data-dir={tmp_path_factory.mktemp('profile')}"

    def browse(url, virtual_ms=VIRTUAL_MS):
        options = ["--headless", "--disable-gpu", "--no-first-run", profile, f"--virtual-time-budget={virtual_ms}"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium's sandbox refuses root
        command = [CHROMIUM, *options, "--dump-dom", url]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    return browse


def text_of(dom):
    """What a reader sees: the DOM's text with one space between its pieces."""
    body = re.sub(r"<script>.*?</script>|<noscript>.*?</noscript>", "", dom.partition("<body>")[2], flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", body)))


def figures_of(dom):
    """The figures at the top by name."""
    return {name: html.unescape(text) for name, text in re.findall(r'id="figure-(\w+)"[^>]*>([^<]*)<', dom)}


def test_the_page_of_a_running_server_shows_its_models_tables_tiers_and_requests(repository, start, browse):
    served = start(repository)
    for keys in ([1], [2, 3], [5000]):
        body = {"samples": [{"dense": [1, 2, 3], "keys": [keys, [1], []]}]}
        assert served.ask("/predict/tiny", body)[0] == 200

    dom = browse(served.url)

    text = text_of(dom)
    assert " Ready " in text
    assert "No answer" not in text
    small, tiny = re.split(r"\btiny\b", text.partition("small")[2])
    assert "0 requests" in small
    assert f"only 2 slots {BY} 4 floats · 50 rows · 0 keys looked up" in small
    assert "3 requests 0 failed 3 samples" in tiny
    assert "Version 2 Ready" in tiny
    assert f"user 1 slot {BY} 4 floats · 1,000 rows · 4 keys looked up" in tiny
    assert re.search(r"memory 3 75\.0 % 75\.0 % 1,000 .* default value 1 25\.0 %", tiny)
    assert f"item 2 slots {BY} 4 floats · 1,000 rows · 3 keys looked up" in tiny
    assert figures_of(dom)["memory"].endswith("MiB")


def test_the_figures_move_with_the_differences_of_readings(browse):
    with status_server(*(status(10.0 + second, requests=100 + 50 * second) for second in range(5))) as server:
        dom = browse(server.url)
        asked = set(server.asked)

    figures = figures_of(dom)
    assert figures | {"memory": ""} == {
        "requests": "50",
        "samples": "3,200",
        "p50": "1.0 ms",
        "p99": "9.7 ms",
        "failed": "0",
        "errors": "0",
        "defaulted": "10.0 %",
        "memory": "",
    }
    assert asked == {"/", "/status"}
    text = text_of(dom)
    assert "1.2.3 · up 14 s · 5 in flight" in text
    assert "300 requests 2 failed 19,200 samples 1.0 ms p50 9.7 ms p99" in text
    assert "Features: user Outputs: OUTPUT0 (probability of 2)" in text
    assert f"3 slots {BY} 16 floats · ≈ 12,345 rows · 3,000 keys looked up" in text
    assert "memory 1,800 60.0 % 60.0 % now 60.0 % 1,000 1.0 MiB" in text
    assert "rocksdb 900 30.0 % 75.0 % now 75.0 % ≈ 12,345" in text
    assert 'aria-label="memory 60.0 %, rocksdb 30.0 %, default value 10.0 %"' in dom
    assert 'aria-label="Requests per second: all models 50"' in dom


def test_the_page_has_a_line_for_each_reader_of_updates(browse):
    tables = [{"name": "user", "step": None, "time_ms": 2**62}]
    ill = reader(worker=1, fault="log: away", lag_messages=1234, lag_s=5.25, rejected={}, tables=tables)
    with status_server(status_with(reader(), ill)) as server:
        text = text_of(browse(server.url))

    newest = "step 4,000, 2023-11-14 22:13:20 newest of user 2020-09-13 12:26:40 newest of item"
    seen = "9.9 ms until visible p99"
    assert f"up updates, worker 0 0 messages behind 0.0 s behind {seen} {newest} 3 rejected 2 row 1 checksum" in text
    assert re.search(rf"fault updates, worker 1 1,234 messages behind 5\.3 s behind {seen} \d+ ms newest of user", text)


def test_the_page_of_a_server_with_tokens_asks_for_a_token(repository, start, browse, tmp_path):
    (tmp_path / "tokens.json").write_text("{}")
    text = text_of(browse(start(repository, "--tokens", str(tmp_path / "tokens.json")).url))

    assert "Needs a token" in text
    assert "a token is needed" in text
    assert "No answer" not in text


def test_the_page_sends_the_token_of_its_tab_and_never_in_a_url(browse):
    with status_server(status()) as server:
        script = "sessionStorage.setItem('hotrow-token', 'secret'); location = '/'"
        server.pages["/sign-in"] = f"<script>{script}</script>".encode()
        text = text_of(browse(f"{server.url}/sign-in"))

        assert "ctr" in text
        assert "Bearer secret" in server.authorizations
        assert set(server.asked) <= {"/sign-in", "/", "/status", "/favicon.ico"}


def test_each_chart_draws_a_point_for_each_second(browse):
    rates = [100, 50, 200, 0]
    counts = [sum(rates[:second]) for second in range(len(rates) + 1)]
    with status_server(
        *(status(10.0 + second, requests=1000 + count) for second, count in enumerate(counts))
    ) as server:
        dom = browse(server.url)

    [line, *_] = re.findall(r'class="curve" d="([^"]*)"', dom)
    heights = [100 - float(y) for _, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", line)]
    # Each point is the mean over all readings so far, at most 5 s; the axis ends at 200.
    assert heights[:4] == pytest.approx([100 / 2, 75 / 2, 350 / 3 / 2, 350 / 4 / 2], abs=0.01)
    places = [float(x) for x, _ in re.findall(r"[ML]([\d.]+) ([\d.]+)", line)][:4]
    assert [after - before for before, after in pairwise(places)] == pytest.approx([100 / 120] * 3, abs=0.02)


def test_percentiles_are_those_of_the_last_seconds(browse):
    before, now = status(10.0), status(11.0)
    now["models"][0]["latency"] = times(50, 25, 29, 0)  # four requests more, between 2 and 10 ms
    with status_server(before, now, status(12.0) | {"models": now["models"]}) as server:
        figures = figures_of(browse(server.url))

    assert (figures["p50"], figures["p99"]) == ("6.0 ms", "9.9 ms")


def test_names_are_text_whatever_they_are(browse):
    models = []
    for name in ODD_NAMES:
        [model] = status(model=name, table=name)["models"]
        [version] = model["versions"]
        version["tables"][0]["tiers"][0]["name"] = version["state"] = version["reason"] = name
        models.append(model)
    with status_server(status(models=models) | {"version": " ".join(ODD_NAMES)}) as server:
        dom = browse(server.url, 2500)

    assert "<title>Hotrow status</title>" in dom
    assert not re.search(r"<img|<b>x", dom.partition("<body>")[2])
    for name in ODD_NAMES:
        assert text_of(dom).count(re.sub(r"\s+", " ", name)) >= 3


def test_a_failure_is_shown_in_red_and_a_model_that_is_not_ready_says_why(browse):
    document = status(is_ready=False, state="not ready")
    [version] = document["models"][0]["versions"]
    version |= {"state": "UNAVAILABLE", "reason": "a tier does not answer"}
    version["tables"][0]["tiers"][1] |= {"errors": 12, "is_up": False}
    with status_server(document) as server:
        dom = browse(server.url)

    assert re.search(r'class="state bad"[^>]*>Not ready<', dom)
    assert re.search(r'class="state bad"[^>]*>a tier does not answer<', dom)
    assert re.search(r'class="second bad"[^>]*>failing, 12 errors<', dom)
    assert re.search(r'<b class="bad">2</b> failed', dom)


def test_a_degraded_model_says_why(browse):
    document = status(state="degraded")
    document["models"][0]["versions"][0]["reason"] = "tier redis does not answer"
    with status_server(document) as server:
        dom = browse(server.url)

    assert re.search(r'class="state warn"[^>]*>Degraded<', dom)
    assert re.search(r'class="state warn"[^>]*>Ready: tier redis does not answer<', dom)


def test_a_restart_begins_again_and_a_new_model_appears(browse):
    after = [status(1.0 + second, requests=10 * second, model="later") for second in range(4)]
    with status_server(status(500.0, requests=9000), *after) as server:
        dom = browse(server.url)

    assert figures_of(dom)["requests"] == "10"
    assert "later" in text_of(dom)
    assert "ctr" not in text_of(dom)


def test_a_server_that_stops_answering_is_reported_and_the_last_figures_stay(browse):
    with status_server(status(10.0), status(11.0, requests=150), b"{") as server:
        text = text_of(browse(server.url))

    assert " No answer " in text
    assert "The server does not answer" in text
    assert "150 requests" in text


def test_a_model_without_a_loaded_version_is_shown(browse):
    document = status()
    document["models"][0]["versions"] = []
    with status_server(document) as server:
        assert "ctr No version 100 requests" in (text := text_of(browse(server.url)))

    assert "No version is loaded." in text


def test_no_model_is_said(browse):
    with status_server(status(models=[])) as server:
        assert "No model is served." in text_of(browse(server.url))


def many_models(second):
    """Twenty-four models; one has a tier that fails, one a version that does not serve, and one is degraded."""
    models = [status(requests=100 + 10 * second, model=f"ctr-{number:02}")["models"][0] for number in range(24)]
    models[3]["versions"][0]["tables"][0]["tiers"][1] |= {"errors": 12 + 2 * second, "is_up": False}
    models[5]["versions"][0] |= {"state": "UNAVAILABLE", "reason": "it is broken"}
    models[7]["versions"][0]["reason"] = "tier redis does not answer"
    return status(10.0 + second) | {"models": models}


def test_many_models_are_an_overview_that_names_what_is_wrong(browse):
    with status_server(*map(many_models, range(3))) as server:
        server.pages["/frame"] = (
            b'<iframe style="width:1200px;height:500px" src="/"></iframe><script>setTimeout(() => '
            b"{ document.title = frames[0].document.documentElement.scrollHeight }, 3000)</script>"
        )
        height = int(re.search(r"<title>(\d+)</title>", browse(f"{server.url}/frame"))[1])
    with status_server(*map(many_models, range(3))) as server:
        dom = browse(server.url)

    text = text_of(dom)
    assert height < 2000
    assert dom.count('<details class="card model"') == 24
    assert "open" not in re.search(r'<details class="card model"[^>]*>', dom)[0]
    assert "Unfold all 24 models" in text
    assert "ctr-02 ready 120 requests 2 failed 7,680 samples" in text
    assert re.search(r"ctr-03 rocksdb failing 120 requests 2 failed \d+ tier errors", text)
    assert "ctr-05 unavailable" in text
    assert "ctr-07 degraded" in text
    assert re.search(r'id="figure-errors" class="bad">2\.0<', dom)


@pytest.mark.parametrize(
    ("act", "shown", "opened"),
    [
        pytest.param("filter('CTR-1')", 10, 0, id="filter"),
        pytest.param("filter('none')", 0, 0, id="filter all"),
        pytest.param("click()", 24, 24, id="unfold all"),
        pytest.param("click(); click()", 24, 0, id="fold all"),
        pytest.param("filter('-03'); click(); filter('')", 24, 1, id="unfold what is shown"),
    ],
)
def test_models_can_be_filtered_and_folded(browse, act, shown, opened):
    page = f"""<iframe src="/"></iframe><script>
      const within = () => frames[0].document;
      const click = () => within().getElementById("fold").click();
      const filter = (text) => {{ const field = within().getElementById("filter"); field.value = text;
        field.dispatchEvent(new Event("input")); }};
      setTimeout(() => {{ {act}; setTimeout(() => {{
        const models = [...within().querySelectorAll("details")];
        document.title = [models.filter((one) => !one.hidden).length, models.filter((one) => one.open).length];
      }}, 1500); }}, 2500)</script>"""
    with status_server(*map(many_models, range(9))) as server:
        server.pages["/frame"] = page.encode()
        dom = browse(f"{server.url}/frame")

    assert re.search(r"<title>([\d,]*)</title>", dom)[1] == f"{shown},{opened}"


def test_few_models_are_open_and_a_fold_stays_when_a_model_comes(browse):
    later = status(12.0) | {"models": [status(model=name)["models"][0] for name in ("ctr", "other")]}
    page = b"""<iframe src="/"></iframe><script>
      setTimeout(() => { frames[0].document.querySelector("details").open = false }, 1500);
      setTimeout(() => { document.title = [...frames[0].document.querySelectorAll("details")].map((one) => one.open) },
        4500)</script>"""
    with status_server(status(10.0), status(11.0), later) as server:
        server.pages["/frame"] = page
        dom = browse(f"{server.url}/frame")

    assert "<title>false,true</title>" in dom


def test_the_charts_survive_a_reload_and_begin_again_with_another_process(browse):
    page = b"""<iframe src="/"></iframe><script>
      const points = () => frames[0].document.querySelector(".curve").getAttribute("d").split(/[ML]/).length - 1;
      setTimeout(() => { window.before = points(); frames[0].location.reload() }, 4500);
      setTimeout(() => { document.title = [window.before, points()] }, 6800)</script>"""
    same = [status(10.0 + second) | {"time_s": 1.7e9 + second} for second in range(40)]
    other = [one | {"time_s": 1.8e9 + one["uptime_s"]} for one in same]
    with status_server(*same) as server:
        server.pages["/frame"] = page
        kept = re.search(r"<title>(\d+),(\d+)</title>", browse(f"{server.url}/frame"))
    with status_server(*same[:5], *other[5:]) as server:
        server.pages["/frame"] = page
        dropped = re.search(r"<title>(\d+),(\d+)</title>", browse(f"{server.url}/frame"))

    assert int(kept[2]) > int(kept[1]) >= 3
    assert int(dropped[2]) < int(kept[2])


@pytest.mark.parametrize(
    ("bucket", "labels"),
    [
        pytest.param([0, 0, 0, 100], ["5 ms", "10 ms"], id="milliseconds"),
        pytest.param([100, 0, 0, 0], ["0.5 ms", "1 ms"], id="a millisecond"),
    ],
)
def test_an_axis_of_times_has_one_unit_and_reads_as_a_time(browse, bucket, labels):
    document = status(10.0)
    documents = []
    for second in range(3):
        counts = [second * one for one in bucket]
        documents.append(status(10.0 + second) | {"models": [document["models"][0] | {"latency": times(*counts)}]})
    with status_server(*documents) as server:
        dom = browse(server.url)

    latency = dom.partition("<h2>Latency</h2>")[2]
    assert re.findall(r"<span style=\"top: \d+%;\">([^<]*)<", latency)[1:3] == labels


def test_a_slow_server_has_an_axis_in_seconds(browse):
    bounds = {"bounds_s": [1.0, 2.5, 10.0], "sum_s": 0.0}
    documents = [status(10.0 + second) for second in range(3)]
    for second, document in enumerate(documents):
        document["models"][0]["latency"] = bounds | {"counts": [0, 50 * second, 0, 0]}
    with status_server(*documents) as server:
        dom = browse(server.url)

    latency = dom.partition("<h2>Latency</h2>")[2]
    assert re.findall(r"<span style=\"top: \d+%;\">([^<]*)<", latency)[1:3] == ["1.5 s", "3 s"]


def test_no_screen_scrolls_sideways(browse):
    widths = [360, 768, 1400]
    document = status(requests=123_456_789, model="m" * 120, table="t" * 120)
    frames = "".join(f'<iframe style="width:{width}px;height:700px;border:0" src="/"></iframe>' for width in widths)
    measure = "document.title = [0, 1, 2].map((number) => frames[number].document.documentElement.scrollWidth)"
    with status_server(*(document | {"uptime_s": 1.0 + second} for second in range(27))) as server:
        server.pages["/frames"] = f"<body>{frames}<script>setTimeout(() => {{ {measure} }}, 3000)</script>".encode()
        dom = browse(f"{server.url}/frames")

    [scrolled] = re.findall(r"<title>([\d,]+)</title>", dom)
    assert all(int(one) <= width for one, width in zip(scrolled.split(","), widths, strict=True))


def test_the_page_and_the_command_show_the_same_figures(browse, capsys):
    with status_server(status(requests=200)) as server:
        text = text_of(browse(server.url, 2500))
        assert main(["stats", server.url]) == 0
    printed = capsys.readouterr().out

    for figure in ("200", "12,800", "1,200", "60.0 %", "600", "75.0 %", "10.0 %", "1.0 MiB", "3.0 GiB", "12,345"):
        assert figure in text
        assert figure in printed
