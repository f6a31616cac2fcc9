"""The codec, and the secret of a user."""

from __future__ import annotations

from tests.mutants.model import Mutant

PROTOCOL = "rendezvous/protocol/"
CODEC = "tests/rendezvous/protocol/test_codec.py::test_"
SECURITY = "tests/rendezvous/protocol/test_security.py::test_"


MUTANTS = (
    Mutant(
        "deep nesting reaches the parser",
        f"{PROTOCOL}codec.py",
        "            if depth > MAX_DEPTH:",
        "            if False:",
        f"{CODEC}bombs_are_refused_quickly",
    ),
    Mutant(
        "a key appears twice",
        f"{PROTOCOL}codec.py",
        "    if len(result) != len(pairs):",
        "    if False:",
        f"{CODEC}the_place_is_named",
    ),
    Mutant(
        "infinite numbers are sent",
        f"{PROTOCOL}codec.py",
        "ensure_ascii=False, allow_nan=False",
        "ensure_ascii=False, allow_nan=True",
        f"{CODEC}infinite_numbers_are_not_sent",
    ),
    Mutant(
        "messages of any length are sent",
        f"{PROTOCOL}codec.py",
        '    if len(data) > Envelope.LIMIT:\n        raise CodecError(f"{kind}',
        '    if False:\n        raise CodecError(f"{kind}',
        f"{CODEC}what_is_too_long_is_not_sent",
    ),
    Mutant(
        "messages of any length are decoded",
        f"{PROTOCOL}codec.py",
        "    if len(data) > limit:",
        "    if False:",
        f"{CODEC}the_place_is_named",
    ),
    Mutant(
        "half a character of a worker ends its agent",
        f"{PROTOCOL}codec.py",
        'return SURROGATE.sub("\\ufffd", text).encode()',
        "return text.encode()",
        f"{CODEC}broken_text_of_a_worker_does_not_break_its_agent",
    ),
    Mutant(
        "a secret shows itself",
        f"{PROTOCOL}security.py",
        '        return "Secret(...)"',
        '        return f"Secret({self._value!r})"',
        f"{SECURITY}a_secret_never_shows",
    ),
    Mutant(
        "a secret is pickled",
        f"{PROTOCOL}security.py",
        '        raise TypeError("a Secret is not pickled")',
        "        return (Secret, (self._value,))  # type: ignore",
        f"{SECURITY}a_secret_never_shows",
    ),
    Mutant(
        "roles share a key",
        f"{PROTOCOL}security.py",
        "derive_key(secret.reveal(), who.encode())",
        "derive_key(secret.reveal(), b'agent')",
        f"{SECURITY}every_role_has_keys_of_its_own",
    ),
    Mutant(
        "a mistyped token is taken",
        f"{PROTOCOL}security.py",
        "if parts[3].lower() != _token_checksum(body):",
        "if False:",
        f"{SECURITY}copy_errors_are_told_apart",
    ),
    Mutant(
        "a token of mixed halves is taken",
        f"{PROTOCOL}security.py",
        "if parts[2].upper() != _key_fingerprint(secret):",
        "if False:",
        f"{SECURITY}a_token_of_mixed_halves_is_refused",
    ),
    Mutant(
        "a token file that others can read is taken",
        f"{PROTOCOL}security.py",
        "if status.st_mode & 0o077:",
        "if False:",
        f"{SECURITY}a_file_that_others_may_use_is_refused",
    ),
    Mutant(
        "a token file of another user is taken",
        f"{PROTOCOL}security.py",
        ("if status.st_uid != os.geteuid() and not (allow_root and status.st_uid == 0):"),
        "if False:",
        f"{SECURITY}a_file_of_another_user_is_refused",
    ),
    Mutant(
        "a token file is a link",
        f"{PROTOCOL}security.py",
        "fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK",
        f"{SECURITY}what_is_no_private_file_is_refused",
    ),
    Mutant(
        "a cookie is half written",
        f"{PROTOCOL}security.py",
        "os.link(draft, path, follow_symlinks=False)",
        "os.replace(draft, path)",
        f"{SECURITY}a_cookie_that_another_process_has_just_made_stays",
    ),
)
