"""Secrets are found by their form and by their value, and what is no secret stays."""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import quote

import pytest
import trustme

from hybrid_proxy.controller.redact import REMOVED, hold, redact

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


# By value

PASSWORD = "correct/horse battery%staple"
SHORT = "hun7er"  # too short to be looked for inside of words
OPAQUE = "opaque.Tok3n-of_a_cluster+that/nobody=knows"
KEY = trustme.CA().issue_cert("client").private_key_pem.bytes().decode()
KEY_LINES = [line for line in KEY.splitlines() if len(line) > 40]

# fmt: off
HELD: list[Any] = [
    pytest.param(OPAQUE, f"it said {OPAQUE}",                                                  id="as it is"),
    pytest.param(OPAQUE, f"x{OPAQUE}y",                                                        id="inside of a word"),
    pytest.param(OPAQUE, f"/path?q={quote(OPAQUE, safe='')}",                                  id="in an address"),
    *(pytest.param(OPAQUE, base64.b64encode(f"{pad}{OPAQUE}".encode()).decode(), id=f"in base64, {len(pad)} before")
      for pad in ("", "a", "ab", "a:b")),
    pytest.param(OPAQUE + "??>>", base64.urlsafe_b64encode(f"{OPAQUE}??>>".encode()).decode(), id="base64 of URLs"),
    pytest.param('with "quotes" and \\', json.dumps('with "quotes" and \\'),                 id="in JSON"),
    pytest.param("schön'geheim", json.dumps("schön'geheim"),                                 id="in ASCII JSON"),
    pytest.param("schön'geheim\\", repr("schön'geheim\\"),                                   id="as Python has it"),
    pytest.param(quote(PASSWORD), PASSWORD,                                                  id="decoded"),
    pytest.param(KEY, "line 3: " + KEY_LINES[1],                                             id="a line of a key"),
    pytest.param(KEY, base64.b64encode(KEY.encode()).decode()[:80],                          id="a key's beginning"),
    pytest.param(SHORT, f"not '{SHORT}'",                                                    id="a short one"),
]
# fmt: on


@pytest.mark.parametrize(("secret", "text"), HELD)
def test_a_value_that_is_held_is_found(secret: str, text: str) -> None:
    hold(secret)
    found = redact(text)
    assert REMOVED in found
    assert text.rsplit(maxsplit=1)[-1] not in found


def test_short_values_are_no_part_of_words_and_the_shortest_are_looked_for_nowhere() -> None:
    hold(SHORT, "t", "abc")
    assert redact(f"a{SHORT}s abc t") == f"a{SHORT}s abc t"


def test_old_values_go_and_those_that_are_held_again_stay() -> None:
    hold(OPAQUE)
    for number in range(600):
        hold(f"another-token-{number:09d}")
        hold(OPAQUE)
    assert redact(OPAQUE) == REMOVED
    assert redact("another-token-000000599") == REMOVED
    assert redact("another-token-000000000") == "another-token-000000000"
