"""workflows/comfy_client/address.py: what a user may write, and what is never shown."""

import pytest


@pytest.fixture
def parse(comfy_client):
    def parse(url, headers=(), insecure=False, **environ):
        return comfy_client.address.parse(url, headers, insecure, environ)

    return parse


@pytest.mark.parametrize(
    ("text", "url", "host", "port", "path"),
    [
        ("127.0.0.1:8188", "http://127.0.0.1:8188", "127.0.0.1", 8188, ""),
        ("http://host", "http://host", "host", 80, ""),
        ("https://Host/comfy/", "https://host/comfy", "host", 443, "/comfy"),
        ("https://host:99/a/b//", "https://host:99/a/b", "host", 99, "/a/b"),
        ("http://[::1]:8188/", "http://[::1]:8188", "::1", 8188, ""),
    ],
)
def test_parse(parse, text, url, host, port, path):
    place = parse(text)
    assert (place.url, place.host, place.port, place.path) == (url, host, port, path)
    assert place.secure == url.startswith("https")
    assert place.headers == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ftp://host", "scheme 'ftp', need http or https"),
        ("http://", "need an address like"),
        ("http://host?x=1", "need an address like"),
        ("http://ho st", "need an address like"),
        ("http://host:99999", "got 'http://host:99999'"),
        ("http://host:port", "got 'http://host:port'"),
    ],
)
def test_parse_bad(parse, text, why):
    with pytest.raises(ValueError, match=why):
        parse(text)


def test_a_password_in_the_address_is_refused_and_not_shown(parse):
    with pytest.raises(ValueError, match="HOPPER_SOL_AUTH") as error:
        parse("http://me:hunter22@host")
    assert "hunter22" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("[::1]", True),
        ("host", False),
        ("10.0.0.1", False),
    ],
)
def test_loopback(parse, url, loopback):
    assert parse(f"http://{url}:1").loopback is loopback


def test_headers(parse):
    assert parse("h", ["A: b", "C:d:e"]).headers == {"A": "b", "C": "d:e"}
    assert parse("h", HOPPER_SOL_AUTH=" Bearer x ").headers == {"Authorization": "Bearer x"}
    both = parse("h", ["authorization: Bearer mine"], HOPPER_SOL_AUTH="Bearer other")
    assert both.headers == {"authorization": "Bearer mine"}


@pytest.mark.parametrize("line", ["hunter22", ": hunter22", "a b: hunter22", "A: hunter22\nB: c"])
def test_bad_headers_are_not_shown(parse, line):
    with pytest.raises(ValueError, match="header") as error:
        parse("h", [line])
    assert "hunter22" not in str(error.value)


def test_bad_authorization_in_the_environment(parse):
    with pytest.raises(ValueError, match="header Authorization") as error:
        parse("h", HOPPER_SOL_AUTH="Bearer hunter22\r\nX: y")
    assert "hunter22" not in str(error.value)


def test_redact(parse):
    place = parse("http://h", ["Authorization: Bearer s3cr3t-t0ken", "X: ab"])
    assert place.redact("got Bearer s3cr3t-t0ken") == "got ***"
    assert place.redact("s3cr3t-t0ken and ab") == "*** and ab"
    assert "s3cr3t" not in repr(place)


def test_tls(parse):
    import ssl

    assert parse("http://h").tls() is None
    strict, loose = parse("https://h").tls(), parse("https://h", insecure=True).tls()
    assert strict.verify_mode is ssl.CERT_REQUIRED and strict.check_hostname
    assert loose.verify_mode is ssl.CERT_NONE and not loose.check_hostname
