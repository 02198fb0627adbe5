"""Where a server is and how to reach it: scheme, base path, headers, TLS."""

import ipaddress
import os
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

AUTH_VARIABLE = "HOPPER_SOL_AUTH"
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Address:
    """A server's address.

    Attributes:
        url: scheme, host, port and base path, without a slash at the end.
        headers: sent with every request; their values are secret.
        insecure: certificates are not checked.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    insecure: bool = False

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or DEFAULT_PORTS[parts.scheme]

    @property
    def path(self) -> str:
        """The base path, "" or "/comfy"."""
        return urlsplit(self.url).path

    @property
    def host_header(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def secure(self) -> bool:
        return urlsplit(self.url).scheme == "https"

    @property
    def loopback(self) -> bool:
        """The server is on this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def tls(self) -> ssl.SSLContext | None:
        """The TLS settings, None for plain HTTP."""
        if not self.secure:
            return None
        context = ssl.create_default_context()
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def redact(self, text: str) -> str:
        """`text` without the values of the headers, should a server repeat them."""
        for secret in self._secrets():
            text = text.replace(secret, "***")
        return text

    def _secrets(self) -> list[str]:
        found = set()
        for value in self.headers.values():
            # "Bearer abc": the scheme is no secret, and what follows may be repeated alone.
            found |= {value, value.split(" ", 1)[-1].strip()}
        # Shorter ones would blank out half of every text.
        return sorted((secret for secret in found if len(secret) >= 6), key=len, reverse=True)


def parse(
    url: str,
    headers: Iterable[str] = (),
    insecure: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Address:
    """The address that a user has written.

    Args:
        url: "host", "host:8188", "http://..." or "https://host/base/path/".
        headers: "Name: value" each; HOPPER_SOL_AUTH is the Authorization unless one is here.
        insecure: do not check certificates.

    Raises:
        ValueError: one of them can't be used. The text never has a header's value in it.
    """
    text = url.strip()
    if "://" not in text:
        text = "http://" + text
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"--server: got {url!r}: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "--server: there is a user name or password in the address; need them in a header: "
            f"set {AUTH_VARIABLE} to 'Basic ...' or 'Bearer ...'"
        )
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError(f"--server: got scheme {parts.scheme!r}, need http or https")
    if not parts.hostname or parts.query or parts.fragment or any(c.isspace() for c in text):
        raise ValueError(
            f"--server: got {url!r}, need an address like http://127.0.0.1:8188 or "
            "https://host/base/path"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    netloc = host if port is None else f"{host}:{port}"
    clean = f"{parts.scheme}://{netloc}{parts.path.rstrip('/')}"
    return Address(clean, _headers(headers, environ), insecure)


def _headers(lines: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not _is_token(name.strip()):
            raise ValueError("--header: need 'Name: value', as in 'Authorization: Bearer ...'")
        found[name.strip()] = value.strip()
    auth = environ.get(AUTH_VARIABLE, "").strip()
    if auth and not any(name.lower() == "authorization" for name in found):
        found["Authorization"] = auth
    for name, value in found.items():
        if not value.isprintable() or not value.isascii():
            raise ValueError(
                f"the value of the header {name} has characters that HTTP does not allow; need "
                "printable ASCII, in one line"
            )
    return found


def _is_token(name: str) -> bool:
    return name.isascii() and all(c.isalnum() or c in "!#$%&'*+-.^_`|~" for c in name)
