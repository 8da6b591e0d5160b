"""Which network device has an address."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def device_of(host: str) -> str:
    """The device that has this IPv4 address; "" = none has, or any will do."""
    try:
        wanted = ipaddress.IPv4Address(host)
    except ValueError:
        return ""
    if wanted.is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no such address
                continue
            if ipaddress.IPv4Address(answer[20:24]) == wanted:
                return name
    return ""
