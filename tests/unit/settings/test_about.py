"""What the help says of settings (`kvsim/settings/config.toml`)."""

from kvsim.settings.config import RunConfig, about


def test_every_setting_is_described_once() -> None:
    assert {*about()} == {*RunConfig.__struct_fields__}


def test_descriptions_are_sentences_in_known_panels() -> None:
    for key, (panel, text) in about().items():
        assert panel in ("Load", "Engine", "Memory", "Time", "Result"), key
        assert text.endswith((".", "...")) and "{" not in text, key
