"""Users that send prediction requests over HTTP or gRPC. ``python -m loadtests`` runs them; see docs/loadtests.md."""

import sys
from pathlib import Path

import grpc.experimental.gevent
import locust.stats
import tritonclient.grpc
import tritonclient.http
from locust import FastHttpUser, LoadTestShape, User, events, task
from tritonclient.utils import InferenceServerException

from kernels.errors import HotrowError
from loadtests.checks import choose_model, refuse_remote
from loadtests.scenarios import SCENARIOS
from loadtests.traffic import Traffic
from serving.cli.client import token_header
from serving.cli.numbers import number, whole_number
from serving.config import read_repository
from serving.errors import ServingError

locust.stats.HISTORY_STATS_INTERVAL_SEC = 1  # so that charts of short runs have points too
grpc.experimental.gevent.init_gevent()  # otherwise one user's call would stop all other users

DATATYPES = {"float32": "FP32", "int64": "INT64", "int32": "INT32", "uint32": "UINT32"}


@events.init_command_line_parser.add_listener
def add_options(parser):
    """Add the options of a load test to Locust's."""
    parser.add_argument("--repository", type=Path, required=True, help="what the server serves")
    parser.add_argument("--model", help="the model's name; needed if there are several models")
    parser.add_argument("--scenario", choices=list(SCENARIOS), default="steady", help="number of users over time")
    parser.add_argument("--samples", type=whole_number(1, 1 << 20), help="samples per request")
    parser.add_argument("--skew", type=number(4), default=1.0, help="exponent of Zipf's law; 0: uniform keys")
    parser.add_argument("--unknown", type=number(1), default=0.01, help="share of keys that no table has")
    parser.add_argument("--allow-remote", action="store_true", help="send load to another machine")
    parser.set_defaults(num_users=8)


@events.init.add_listener
def prepare(environment, **_):
    """Check the options and read the model's keys. An error ends the process."""
    options = environment.parsed_options
    try:
        if options.num_users < 1:
            raise ServingError(f"expected at least 1 user, got --users {options.num_users}")
        if not options.allow_remote:
            refuse_remote(options.host or "")
        config = choose_model(read_repository(options.repository).models, options.model)
        environment.token_header = token_header()
        scenario = SCENARIOS[options.scenario]
        samples = options.samples or scenario.samples
        environment.traffic = Traffic(config, samples, options.skew, options.unknown, scenario.has_candidates)
    except HotrowError as err:
        sys.exit(f"loadtests: {err}")
    environment.model = config.name


def inputs_of(arrays, client):
    """The tensors of ``tritonclient.http`` or ``tritonclient.grpc``."""
    inputs = []
    for name, array in arrays.items():
        inputs.append(client.InferInput(name, array.shape, DATATYPES[array.dtype.name]))
        inputs[-1].set_data_from_numpy(array)
    return inputs


class HttpClient(FastHttpUser):
    """Sends its next request as soon as an answer arrives."""

    @task
    def infer(self):
        """Send one request; an answer without predictions is a failure."""
        inputs = inputs_of(self.environment.traffic.arrays(), tritonclient.http)
        body, json_bytes = tritonclient.http.InferenceServerClient.generate_request_body(inputs)
        headers = {"Inference-Header-Content-Length": str(json_bytes), **self.environment.token_header}
        path = f"/v2/models/{self.environment.model}/infer"
        with self.client.post(path, data=body, headers=headers, catch_response=True) as answer:
            if answer.status_code != 200 or "inference-header-content-length" not in answer.headers:
                answer.failure(f"{answer.status_code}: {answer.text[:200] if answer.text else 'no answer'}")


class GrpcClient(User):
    """The same over gRPC. ``--host`` is HOST:PORT."""

    def on_start(self):
        """Connect."""
        self._client = tritonclient.grpc.InferenceServerClient(self.environment.host)

    def on_stop(self):
        """Disconnect."""
        self._client.close()

    @task
    def infer(self):
        """Send one request; an answer without predictions is a failure."""
        inputs = inputs_of(self.environment.traffic.arrays(), tritonclient.grpc)
        with self.environment.events.request.measure("grpc", f"ModelInfer {self.environment.model}") as request:
            try:
                answer = self._client.infer(self.environment.model, inputs, headers=self.environment.token_header)
            except InferenceServerException as err:
                raise RuntimeError(str(err)) from err  # the report shows an error's repr
            request["response_length"] = sum(map(len, answer.get_response().raw_output_contents))


class Scenario(LoadTestShape):
    """The number of users over time."""

    use_common_options = True

    def tick(self):
        """Return the number of users and how many may start per second; None at the end."""
        options = self.runner.environment.parsed_options
        scenario = SCENARIOS[options.scenario]
        elapsed = self.get_run_time() / (options.run_time or scenario.run_time_s)
        return (scenario.users(elapsed, options.num_users), options.num_users) if elapsed < 1 else None
