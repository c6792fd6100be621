"""What is taken of the official client: enough of it, little of it, and nothing taken from others."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from hybrid_proxy.controller.kubernetes.client import client
parts = client()
parts.RESTClientObject(parts.Configuration()).pool_manager
parts.kube_config.KubeConfigLoader, parts.incluster_config.load_incluster_config
print(any(name.partition(".")[0] == "kubernetes" for name in sys.modules))
print(sum(name.startswith("jsonschema") for name in sys.modules))
import kubernetes
print(kubernetes.client.CoreV1Api.__name__, kubernetes.config.load_kube_config.__name__)
print(kubernetes.client.Configuration is parts.Configuration)
"""
WHOLE = """
import sys
import kubernetes
from hybrid_proxy.controller.kubernetes.client import client
print(client().Configuration is kubernetes.client.Configuration)
"""
SIZE = """
import sys, urllib3
before = len(sys.modules)
{}
print(len(sys.modules) - before)
"""


def said(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_others_get_the_whole_client_afterwards() -> None:
    nothing_left, no_validators, *whole, same = said(SCRIPT)
    assert (nothing_left, no_validators) == ("False", "0")
    assert whole == ["CoreV1Api", "load_kube_config"]
    assert same == "False"


def test_a_client_that_is_there_is_used() -> None:
    assert said(WHOLE) == ["True"]


def test_the_parts_are_few() -> None:
    parts = int(said(SIZE.format("from hybrid_proxy.controller.kubernetes.client import client; client()"))[0])
    whole = int(said(SIZE.format("import kubernetes"))[0])
    assert parts < whole * 0.8, f"{parts} modules for the parts, {whole} for the whole client"


RENEWAL = """
import sys
from hybrid_proxy.controller.kubernetes.client import client
parts = client().kube_config
print(any(name.partition(".")[0] in ("oauthlib", "requests", "requests_oauthlib") for name in sys.modules))
print(type(parts.OAuth2Session(client_id="us")).__module__)
print(parts.oauthlib.oauth2.rfc6749.errors.InvalidClientIdError.__name__)
"""


def test_what_renews_a_token_is_imported_when_one_is_renewed() -> None:
    at_start, session, error = said(RENEWAL)
    assert at_start == "False"
    assert session.startswith("requests_oauthlib")
    assert error == "InvalidClientIdError"
