"""Every exception Solaris raises on purpose, in one tree.

    SolarisError
    ├── SettingsError          a setting is wrong: names the key, the value and the remedy
    ├── InvalidEvent           one event cannot be used: `reason` is a stable code for counters and the DLQ
    │   ├── DecodeError        bytes that are not the type they claim (JSON, packed record)
    │   └── EventRejected      decoded, but against a rule (time out of range, key differs from user, ...)
    ├── ContractError          a topic or log does not match its contract
    ├── BrokerError            a broker cannot be started, reached or used
    │   └── IdentityLost       the broker takes this member or producer for another's, or no longer knows its state
    ├── BundleError            a model bundle is incomplete, inconsistent or unsupported
    ├── DeviceError            the inference device asked for is not the one there is
    └── StoreError             the state store cannot be opened or written
        ├── StoreLocked        another live process holds it
        ├── StoreFormatError   written by a newer or foreign program
        └── StoreFull          no space, or read-only

A bad *record* is normally a value (`topics.events.Rejected`), not an exception through the loop;
`InvalidEvent` is what the decoders raise when called one record at a time.
"""

from __future__ import annotations


class SolarisError(Exception):
    """Base of all errors raised on purpose; the command line prints its text without a traceback."""


class SettingsError(SolarisError):
    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(f"setting {key} = {value!r}: {remedy}")
        self.key, self.value, self.remedy = key, value, remedy


class InvalidEvent(SolarisError):
    """`reason`: a short stable code such as `not_json` or `time_out_of_range`; the text says more."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class DecodeError(InvalidEvent):
    pass


class EventRejected(InvalidEvent):
    pass


class ContractError(SolarisError):
    pass


class BrokerError(SolarisError):
    pass


class IdentityLost(BrokerError):
    pass


class BundleError(SolarisError):
    pass


class DeviceError(SolarisError):
    pass


class StoreError(SolarisError):
    pass


class StoreLocked(StoreError):
    pass


class StoreFormatError(StoreError):
    pass


class StoreFull(StoreError):
    pass
