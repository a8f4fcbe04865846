"""The files in docker/: lint them, and run the commands that they run, without a container engine."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
import urllib.request
from contextlib import closing
from pathlib import Path

import kubernetes_validate
import numpy as np
import promql_parser
import pytest
import yaml

from serving.cli.variables import VARIABLES
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.repository import ModelRepository
from serving.request_log import RequestLog
from serving.stream.folder import FolderSink
from serving.stream.message import Kind, UpdateMessage, encode
from tests.e2e.conftest import serving
from tests.serving.frontend.app_client import Client
from tests.serving.ps_files import write_ps
from tests.tools.redis_servers import RedisServer, free_port, server_binary, wait_until
from tests.tools.tiny_model import TinyModel

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
BIN = Path(sys.executable).parent
SERVERS = ["cpu", "gpu", "triton"]
DOCKERFILES = [*SERVERS, "train"]
MODELS = "/models"
DASHBOARD = json.loads((DOCKER / "grafana" / "hotrow.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
ALERTS = [rule for group in yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def read_yaml(name):
    return yaml.safe_load((DOCKER / name).read_text())


def instructions(name):
    """Each instruction of a Dockerfile and its argument, without comments; continued lines are joined."""
    text = re.sub(r"^#.*\n", "", (DOCKER / f"{name}.Dockerfile").read_text(), flags=re.MULTILINE)
    return [line.split(" ", 1) for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line]


def last(name, instruction):
    return [argument for found, argument in instructions(name) if found == instruction][-1]


def variables(name):
    """The environment that a Dockerfile's ENV sets."""
    return dict(
        pair.split("=", 1) for found, text in instructions(name) if found == "ENV" for pair in shlex.split(text)
    )


def health_check(name):
    return json.loads(last(name, "HEALTHCHECK").partition(" CMD ")[2])


def is_healthy(name, environment):
    """Whether a Dockerfile's health check succeeds with these variables."""
    command = [re.sub(r"\b8000\b", environment["HOTROW_HTTP_PORT"], word) for word in health_check(name)]
    return run(command, env=environment).returncode == 0


def run(command, **options):
    options.setdefault("env", {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"})
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def a_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# The servers of the compose file on this machine.


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    TinyModel().write(folder, "tiny")
    return folder


@pytest.fixture(scope="module")
def redis_addresses(tmp_path_factory):
    """The nodes of the compose file, with its options, joined by its command."""
    if server_binary() is None:
        pytest.skip("there is no redis-server")
    tools = Path(server_binary()).parent
    services = read_yaml("compose.yaml")["services"]
    folder = tmp_path_factory.mktemp("redis")
    nodes, addresses = [], {}
    for number in (1, 2, 3):
        service = services[f"redis-{number}"]
        program, *options = service["command"]
        assert program == "redis-server"
        assert options[:2] == ["--port", "7000"]
        nodes.append(RedisServer(folder / str(number), *options[2:], port=free_port()))
        addresses[f"{service['networks']['default']['ipv4_address']}:7000"] = f"127.0.0.1:{nodes[-1].port}"
    shell, option, script = services["redis-cluster"]["command"]
    for address, local in addresses.items():
        host, port = local.split(":")
        script = script.replace(address, local).replace(
            f"-h {address.partition(':')[0]} -p 7000", f"-h {host} -p {port}"
        )
    path = f"{tools}:{os.environ['PATH']}"
    for _ in range(2):  # the second start finds the cluster
        joined = run([shell, option, script], env={**os.environ, "PATH": path})
        assert joined.returncode == 0, joined.stdout + joined.stderr
    checks = [services[f"redis-{number}"]["healthcheck"]["test"] for number in (1, 2, 3)]
    for check, node in zip(checks, nodes, strict=True):
        command = [str(node.port) if word == "7000" else word for word in check[1:]]
        assert run(command, env={**os.environ, "PATH": path}).stdout == "PONG\n"
    yield addresses
    for node in nodes:
        node.kill()


@pytest.fixture(scope="module")
def served(models, redis_addresses, tmp_path_factory):
    """The command of the CPU image with its variables and the tiers of docker/ps.json, on an emulated GPU."""
    tiers = (DOCKER / "ps.json").read_text()
    for address, local in redis_addresses.items():
        assert address in tiers
        tiers = tiers.replace(address, local)
    (models / "ps.json").write_text(tiers)
    ports = {"HOTROW_HTTP_PORT": str(a_port()), "HOTROW_GRPC_PORT": str(a_port())}
    assert variables("cpu").keys() >= ports.keys()
    compose = read_yaml("compose.yaml")["services"]["hotrow"]["environment"]
    environment = {**os.environ, **variables("cpu"), **compose, **ports, "HOTROW_HOST": "127.0.0.1"}
    environment |= {"HOTROW_DEVICE": "runner", "PATH": f"{BIN}:{os.environ['PATH']}"}
    command = json.loads(last("cpu", "ENTRYPOINT")) + [
        str(models) if word == MODELS else word for word in json.loads(last("cpu", "CMD"))
    ]
    log = tmp_path_factory.mktemp("log") / "stderr"
    with log.open("w") as errors, subprocess.Popen(command, env=environment, stdout=errors, stderr=errors) as process:
        try:
            wait_until(lambda: is_healthy("cpu", environment) or process.poll() is not None, "the server is healthy")
            assert process.poll() is None, log.read_text()
            yield environment
            process.terminate()
            assert process.wait(10) == 0  # a container engine then sends SIGKILL
        finally:
            process.kill()


@pytest.fixture(scope="module")
def page(served):
    """The metrics page after a request."""
    url = f"http://127.0.0.1:{served['HOTROW_HTTP_PORT']}"
    body = {"samples": [{"dense": [0.1, 0.2, 0.3], "keys": [[1], [2], [999_999]]}]}
    request = urllib.request.Request(f"{url}/predict/tiny", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer)["defaulted_keys"] == 1
    [job] = read_yaml("prometheus.yml")["scrape_configs"]
    with urllib.request.urlopen(url + job["metrics_path"]) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("name", [*DOCKERFILES, "sagemaker"])
def test_a_dockerfile_passes_hadolint(name):
    checked = run(["hadolint", str(DOCKER / f"{name}.Dockerfile")])

    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_does_not_run_as_root(name):
    assert int(last(name, "USER")) > 0


@pytest.mark.parametrize("name", DOCKERFILES)
def test_only_the_first_stage_has_a_compiler(name):
    stages = (DOCKER / f"{name}.Dockerfile").read_text().split("\nFROM ")[-2:]

    assert ["g++" in stage for stage in stages] == [True, False]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_installs_extras_that_exist(name):
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (DOCKER / f"{name}.Dockerfile").read_text()
    cuda = re.search(r"^ARG CUDA=(\w+)$", text, flags=re.MULTILINE)

    [extras] = re.findall(r"hotrow-\*\.whl\)\[(.*)\]", text)

    assert {extra.replace("${CUDA}", cuda[1] if cuda else "") for extra in extras.split(",")} <= known.keys()


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_an_image_sets_options_that_the_server_has(name):
    options = {variable for variable in variables(name) if variable.startswith("HOTROW_")}

    assert options <= VARIABLES.keys()
    assert last(name, "EXPOSE").split() == [variables(name)[f"HOTROW_{kind}_PORT"] for kind in ("HTTP", "GRPC")]


def test_sagemakers_container_serves_its_model_whatever_word_it_is_started_with(tmp_path):
    (tmp_path / "hotrow").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "hotrow").chmod(0o755)
    command = [*json.loads(last("sagemaker", "ENTRYPOINT")), "serve"]

    assert run(command, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}).stdout == "serve /opt/ml/model\n"
    assert variables("sagemaker") == {"HOTROW_HTTP_PORT": last("sagemaker", "EXPOSE")}
    assert variables("sagemaker").keys() <= VARIABLES.keys()


def test_the_images_of_cpu_and_gpu_differ_in_the_gpu_only():
    lines = [(DOCKER / f"{name}.Dockerfile").read_text().splitlines() for name in ("cpu", "gpu")]

    different = [line for line in lines[1] if line not in lines[0] and not line.startswith("#")]

    assert len(different) == 6
    assert all(re.search("CUDA|cuda|GRPC_PORT|NVIDIA", line) for line in different)


def test_the_build_context_has_what_the_wheel_is_built_from():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", "CMakeLists.txt", "constraints.txt", "README.md"}

    assert kept == needed | set(project["project"]["license-files"]) | set(
        project["tool"]["scikit-build"]["wheel"]["packages"]
    )


@pytest.mark.long
def test_the_wheel_can_be_built_from_the_build_context(tmp_path):
    context = tmp_path / "context"
    context.mkdir()
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source = ROOT / line[1:]
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, context / line[1:])
    for built in context.rglob("*.so"):
        built.unlink()

    command = ["pip", "wheel", "--no-cache-dir", "--no-deps", "--wheel-dir", str(tmp_path / "wheels"), "."]
    assert f"RUN {' '.join(command)}".replace(str(tmp_path), "") in (DOCKER / "cpu.Dockerfile").read_text()
    built = subprocess.run([sys.executable, "-m", *command], cwd=context, capture_output=True, text=True, check=False)

    assert built.returncode == 0, built.stderr
    assert list((tmp_path / "wheels").glob("hotrow-*.whl"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVERS)
def test_a_health_check_succeeds_only_while_the_server_is_ready(served, name):
    if name == "triton" and shutil.which("curl") is None:
        pytest.skip("there is no curl")

    assert is_healthy(name, served)
    assert not is_healthy(name, served | {"HOTROW_HTTP_PORT": str(a_port())})


def test_the_compose_file_fits_its_schema():
    checked = run(["check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DOCKER / "compose.yaml")])

    assert checked.returncode == 0, checked.stdout


def test_the_compose_file_refers_to_what_exists():
    compose = read_yaml("compose.yaml")
    for service in compose["services"].values():
        assert set(service.get("depends_on", ())) <= compose["services"].keys()
        for volume in service.get("volumes", ()):
            source = volume.replace("${MODELS:-../demo_output/models}", "MODELS").split(":")[0]
            is_file = source.startswith(".") and (DOCKER / source).is_file()
            assert is_file or source in compose["volumes"] or source == "MODELS", volume
        if "build" in service:
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_compose_file_opens_ports_on_this_machine_only():
    ports = [port for service in read_yaml("compose.yaml")["services"].values() for port in service.get("ports", ())]

    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_every_service_that_keeps_running_has_a_health_check():
    services = read_yaml("compose.yaml")["services"]

    without = {name for name, service in services.items() if "healthcheck" not in service}

    assert without == {"hotrow", "redis-cluster", "trainer"}  # the image has one; the others end


@pytest.fixture
def broker(tmp_path):
    """The compose file's broker."""
    if server_binary() is None:
        pytest.skip("there is no redis-server")
    program, *options = read_yaml("compose.yaml")["services"]["broker"]["command"]
    assert program == "redis-server"
    assert options[:2] == ["--port", "7000"]
    server = RedisServer(tmp_path / "broker", *options[2:], port=free_port())
    yield server
    server.kill()


@pytest.mark.long
def test_the_server_follows_the_trainer_of_the_compose_file(broker, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "trainer").mkdir()
    address = f"127.0.0.1:{broker.port}"
    trainer = read_yaml("compose.yaml")["services"]["trainer"]
    shell, option, script = trainer["entrypoint"]
    assert trainer["environment"].keys() == {"SAMPLES", "EPOCHS"}
    for inside, local in {
        "$$": "$",
        "/models": str(tmp_path / "models"),
        "/var/lib/hotrow": str(tmp_path / "trainer"),
        "broker:7000": address,
    }.items():
        assert inside in script
        script = script.replace(inside, local)
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "SAMPLES": "600", "EPOCHS": "3"}
    trained = run([shell, option, script], env=environment)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    shutil.rmtree(tmp_path / "models" / "live" / "2")  # a server is to read the updates after the first version

    tiers = (DOCKER / "ps-updates.json").read_text()
    tiers = tiers.replace("/var/lib/hotrow", str(tmp_path)).replace("broker:7000", address)
    (tmp_path / "models" / "ps.json").write_text(tiers)
    with serving(tmp_path / "models", tmp_path / "stderr") as served:
        newest = broker.client().xinfo_stream("hotrow.live")["last-generated-id"].decode()
        wait_until(lambda: positions(served.url) == [newest], "the server has read all updates")
        [applied] = [reader["applied"] for reader in readers(served.url)]

    assert applied["upsert"] > 0


def readers(url):
    """What reads updates in a server."""
    asked = run(["hotrow", "updates", url, "--json"])
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


def positions(url):
    return [part["position"] for reader in readers(url) for part in reader["partitions"]]


def test_prometheus_scrapes_the_port_of_the_image():
    [job] = read_yaml("prometheus.yml")["scrape_configs"]
    [target] = job["static_configs"]

    assert target["targets"] == [f"hotrow:{variables('cpu')['HOTROW_HTTP_PORT']}"]
    assert f'job="{job["job_name"]}"' in "".join(QUERIES)


def metrics_of(expression):
    """The names of the metrics in a query, which the parser also checks."""
    expression = expression.replace("$__rate_interval", "1m")  # Grafana's
    found = []
    promql_parser.walk(promql_parser.parse(expression), lambda node: found.append(getattr(node, "name", None)) or True)
    return {name for name in found if name}


@pytest.fixture(scope="module")
def metric_names(page, tmp_path_factory):
    """The names on the pages of that server, and of a server that follows updates and logs requests."""
    folder = tmp_path_factory.mktemp("followed")
    TinyModel().write(folder / "models", "ctr", 3)
    write_ps(folder / "models", update_source={"type": "folder", "path": str(folder / "log"), "poll_timeout_ms": 20})
    log = FolderSink(folder / "log")
    for run in (None, "another"):
        rows = np.ones((1, 4), np.float32)
        log.send(encode(UpdateMessage(Kind.UPSERT, "ctr", "user", np.array([1]), rows, run=run)), 0)
    log.send(b"no message", 0)
    with ModelRepository(folder / "models") as repository:
        repository.load()
        with closing(RequestLog(folder / "requests", 1, 1 << 20)) as log:
            client = Client(create_app(FrontEnd(repository, request_log=log)))
            wait_until(lambda: "hotrow_update_rejected_total{" in client.get("/metrics").text, "a message is rejected")
            followed = client.get("/metrics").text
    return set(re.findall(r"^(\w+)(?:\{| )", page + followed, flags=re.MULTILINE))


@pytest.mark.slow
def test_every_metric_of_the_dashboard_the_alerts_and_the_autoscaling_is_on_a_servers_page(metric_names):
    of_prometheus = {"up"}
    scaling = [trigger["metadata"]["query"] for trigger in read_yaml("keda.yaml")["spec"]["triggers"]]
    for query in [*QUERIES, *(rule["expr"] for rule in ALERTS), *scaling]:
        asked = metrics_of(query)
        assert asked
        assert asked - of_prometheus <= metric_names


def test_the_alerts_have_what_prometheus_and_a_reader_need():
    names = [rule["alert"] for rule in ALERTS]

    assert len(names) == len(set(names))
    for rule in ALERTS:
        assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
        assert rule["annotations"].keys() == {"summary"}
        promql_parser.parse(rule["expr"])


def test_the_examples_of_alerts_name_the_labels_that_the_server_has(metric_names):
    examples = read_yaml("alerts_test.yml")
    series = [entry["series"] for test in examples["tests"] for entry in test["input_series"]]

    assert examples["rule_files"] == ["alerts.yml"]
    for sery in series:
        [selector] = [promql_parser.parse(sery)]
        assert selector.name in metric_names | {"up"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")
def test_the_alerts_fire_when_they_should():
    checked = run(["promtool", "test", "rules", str(DOCKER / "alerts_test.yml")])

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_prometheus_reads_the_alerts():
    mounts = dict(volume.split(":")[:2] for volume in read_yaml("compose.yaml")["services"]["prometheus"]["volumes"])
    folder = Path(mounts["./prometheus.yml"]).parent

    assert [str(folder / file) for file in read_yaml("prometheus.yml")["rule_files"]] == [mounts["./alerts.yml"]]


def test_the_autoscaling_is_of_the_charts_deployment():
    spec = read_yaml("keda.yaml")["spec"]

    assert spec["scaleTargetRef"]["name"] == rendered()["Deployment"]["metadata"]["name"]
    assert spec["minReplicaCount"] < spec["maxReplicaCount"]
    assert all(float(trigger["metadata"]["threshold"]) > 0 for trigger in spec["triggers"])


def test_grafana_finds_its_data_source_and_its_dashboard():
    [source] = read_yaml("grafana/datasource.yaml")["datasources"]
    [provider] = read_yaml("grafana/dashboards.yaml")["providers"]
    mounts = dict(volume.split(":")[:2] for volume in read_yaml("compose.yaml")["services"]["grafana"]["volumes"])
    listed = [*DASHBOARD["panels"], *DASHBOARD["templating"]["list"]]

    assert {user["datasource"]["uid"] for user in listed} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    assert Path(mounts["./grafana/hotrow.json"]).parent == Path(provider["options"]["path"])


def unit():
    """The systemd unit with this environment's programs, and its settings."""
    text = (DOCKER / "hotrow.service").read_text().replace("/opt/hotrow/bin", str(BIN))
    return text, dict(re.findall(r"^(\w+)=(.*)$", text, flags=re.MULTILINE))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path):
    file = tmp_path / "hotrow.service"
    file.write_text(unit()[0])

    checked = run(["systemd-analyze", "verify", str(file)])
    exposed = run(["systemd-analyze", "security", "--offline=yes", "--threshold=40", str(file)])

    assert (checked.returncode, checked.stderr) == (0, "")
    assert exposed.returncode == 0, exposed.stdout


@pytest.mark.slow
def test_the_unit_starts_the_server_and_waits_until_it_is_ready(served):
    _, settings = unit()
    program, *arguments = settings["ExecStart"].split()

    assert (Path(program).name, arguments[0]) == ("hotrow", "serve")
    assert run([program, "serve", "--help"]).returncode == 0
    assert run(shlex.split(settings["ExecStartPost"]), env=served).returncode == 0
    assert settings["DynamicUser"] == "yes"


PROBES = ("readinessProbe", "livenessProbe")


def test_the_runtime_of_kserve_fits_the_image():
    spec = read_yaml("kserve-runtime.yaml")["spec"]
    [container] = spec["containers"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hotrow"}, "spec": {"containers": [container]}}
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    port = int(given["HOTROW_HTTP_PORT"])

    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    assert given.keys() <= VARIABLES.keys()
    assert [entry["containerPort"] for entry in container["ports"]] == [port]
    assert spec["annotations"]["prometheus.kserve.io/port"] == str(port)
    assert int(given["HOTROW_SHUTDOWN_DELAY_S"]) + int(given["HOTROW_DRAIN_TIMEOUT_S"]) < 30  # Kubernetes' own time


@pytest.mark.slow
def test_the_probes_of_kserve_are_answered(served):
    spec = read_yaml("kserve-runtime.yaml")["spec"]
    [container] = spec["containers"]
    for probe in PROBES:
        assert run(container[probe]["exec"]["command"], env=served).returncode == 0
    metrics = f"http://127.0.0.1:{served['HOTROW_HTTP_PORT']}{spec['annotations']['prometheus.kserve.io/path']}"
    with urllib.request.urlopen(metrics) as answer:
        assert answer.status == 200


def rendered(**values):
    """What Helm makes of the chart with these values, by kind."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    with helm.Chart.load(str(DOCKER / "helm")) as chart:
        files = chart.render(values, name="ctr", namespace="serving")
    objects = [part for text in files.values() for part in yaml.safe_load_all(text) if part]
    for part in objects:
        kubernetes_validate.validate(part, kubernetes_validate.latest_version(), strict=True)
    return {part["kind"]: part for part in objects}


def container_of(objects):
    spec = objects["Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    return spec, container, {variable["name"]: variable["value"] for variable in container["env"]}


def test_helm_accepts_the_chart():
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")

    found = helm.lint(str(DOCKER / "helm"), strict=True)

    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


def test_the_chart_starts_the_image_and_selects_its_pods():
    objects = rendered()
    spec, container, environment = container_of(objects)
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [objects[kind]["spec"]["selector"] for kind in ("Deployment", "PodDisruptionBudget")]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}

    assert environment.keys() <= VARIABLES.keys()
    assert [*(selector["matchLabels"] for selector in selectors), objects["Service"]["spec"]["selector"]] == 3 * [
        labels
    ]
    assert ports == {kind: int(variables("cpu")[f"HOTROW_{kind.upper()}_PORT"]) for kind in ("http", "grpc")}
    assert {port["targetPort"] for port in objects["Service"]["spec"]["ports"]} == ports.keys()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


def test_the_chart_waits_for_the_stop_of_the_server():
    spec, _, environment = container_of(rendered(options={"shutdown-delay-s": 30, "drain-timeout-s": 60}))

    assert (environment["HOTROW_SHUTDOWN_DELAY_S"], environment["HOTROW_DRAIN_TIMEOUT_S"]) == ("30", "60")
    assert spec["terminationGracePeriodSeconds"] > 90


def test_the_chart_passes_options_on_as_the_server_reads_them():
    options = {"access-log": True, "max-body-bytes": 1 << 28, "load-model": "*", "sample": 0.05, "engine": "numpy"}
    _, _, environment = container_of(rendered(options=options))

    assert environment["HOTROW_ACCESS_LOG"] == "1"
    assert environment["HOTROW_MAX_BODY_BYTES"] == "268435456"
    assert environment["HOTROW_LOAD_MODEL"] == "*"
    assert environment["HOTROW_SAMPLE"] == "0.05"
    assert environment["HOTROW_LOG_FORMAT"] == "json"  # a default of the chart


def test_the_chart_mounts_tokens_and_certificates_that_exist():
    spec, container, environment = container_of(rendered(tokensSecret="tokens", tlsSecret="tls"))
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}

    assert Path(environment["HOTROW_TOKENS"]).parent == Path(mounted["tokens"])
    assert {Path(environment[f"HOTROW_SSL_{file}FILE"]).parent for file in ("CERT", "KEY")} == {Path(mounted["tls"])}
    assert {volume["name"] for volume in spec["volumes"] if "secret" in volume} == {"tokens", "tls"}


def test_the_chart_copies_a_bucket_into_the_volume_of_models():
    secret = {"secretKeyRef": {"name": "bucket", "key": "id"}}
    values = {"bucket": "s3://bucket/models", "env": [{"name": "AWS_ACCESS_KEY_ID", "valueFrom": secret}]}
    objects = rendered(**values, models={"emptyDir": {}})
    [container] = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    environment = {variable["name"]: variable for variable in container["env"]}
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "models"]

    assert container["args"] == ["s3://bucket/models"]
    assert environment["HOTROW_COPY_TO"]["value"] == mount["mountPath"]
    assert environment["AWS_ACCESS_KEY_ID"]["valueFrom"] == secret
    assert mount["readOnly"] is False


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({"bucket": "bucket/models"}, "bucket", id="a bucket without a protocol"),
        pytest.param({"option": {}}, "option", id="an unknown value"),
        pytest.param({"options": {"max_inflight": 3}}, "max_inflight", id="an option with underscores"),
        pytest.param({"options": {"drain-timeout-s": "8s"}}, "drain-timeout-s", id="a time that is no number"),
        pytest.param({"options": {"http-port": 80}}, "http-port", id="a port that the service does not have"),
    ],
)
def test_the_chart_refuses_wrong_values(values, expected):
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")

    with pytest.raises(helm.HelmError, match=expected):
        rendered(**values)


@pytest.mark.slow
def test_the_probes_of_the_chart_are_answered(served):
    _, container, _ = container_of(rendered())

    for probe in PROBES:
        assert run(container[probe]["exec"]["command"], env=served).returncode == 0
