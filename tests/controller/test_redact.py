"""No secret leaves the node in a bundle, and what is no secret stays."""

from __future__ import annotations

import json

import pytest

from hybrid_proxy.controller.redact import redact

SECRET = "s3cr3tHunter2Value"
JWT = "eyJhbGciOiJSUzI1NiIsImtpZCI6IiJ9.eyJpc3MiOiJrdWJlcm5ldGVzIn0.c2lnbmF0dXJlLW9mLWEtdG9rZW4"
PEM = f"-----BEGIN RSA PRIVATE KEY-----\nMIIE{SECRET}\nabc\n-----END RSA PRIVATE KEY-----"
KUBECONFIG = f"""
users:
- name: admin
  user:
    client-certificate-data: {SECRET}
    client-key-data: {SECRET}
    token: {SECRET}
    password: "{SECRET}"
"""

# fmt: off
PLANTED = [
    pytest.param(f"token: {SECRET}", id="a YAML key"),
    pytest.param(f"  bearer_token = {SECRET}", id="an INI key"),
    pytest.param(f"API_TOKEN={SECRET}", id="a variable of the environment"),
    pytest.param(f"run --token={SECRET} --v 2", id="a flag with ="),
    pytest.param(f"run --token {SECRET} --v 2", id="a flag and its value"),
    pytest.param(f"run\0--token\0{SECRET}\0--v", id="a flag in a command line of /proc"),
    pytest.param(f"Authorization: Bearer {SECRET}", id="a header"),
    pytest.param(f"curl -H 'Authorization: Basic {SECRET}=='", id="a header that is quoted"),
    pytest.param(f"https://root:{SECRET}@10.0.0.1:6443/", id="a URL"),
    pytest.param(f'{{"password": "{SECRET}"}}', id="JSON"),
    pytest.param(f'{{"clientSecret":"{SECRET}"}}', id="JSON without spaces"),
    pytest.param(f'accept comment "token={SECRET}"', id="a comment of a rule"),
    pytest.param(PEM, id="a private key"),
    pytest.param(PEM.rpartition("\n")[0], id="a private key that is cut"),
    pytest.param(KUBECONFIG, id="the user of a kubeconfig"),
    pytest.param(f"read {JWT} from the file {SECRET * 8}", id="a token and base64 in a sentence"),
]
# fmt: on


@pytest.mark.parametrize("text", PLANTED)
def test_a_planted_secret_is_not_in_the_text(text: str) -> None:
    assert SECRET not in redact(text)
    assert JWT not in redact(text)


# fmt: off
HARMLESS = [
    "net.ipv4.ip_forward = 1",
    "tcp dport 8080 counter packets 3 bytes 180 drop",
    "2026-01-01 12:00:00 W the token of the service account cannot be read",
    "--kubeconfig /etc/kubernetes/admin.conf --cluster-cidr 10.0.0.0/8",
    "image: registry.example/hybrid-proxy@sha256:" + "0123456789abcdef" * 4,
    "fd77:1::/48 via fd77::2 dev eth0",
]
# fmt: on


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_json_stays_json() -> None:
    value = {"token": f'a"{SECRET}', "list": [{"name": "x", "note": f"Bearer {SECRET}"}], "n": 1, "secrets": ["kept"]}
    found = json.loads(redact(json.dumps(value)))
    assert found["n"] == 1
    assert SECRET not in json.dumps(found)
