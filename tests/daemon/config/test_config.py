import contextlib
import os
import pwd
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.units import GIB, MIB, TIB
from kvtier_daemon.config.members import member_of
from kvtier_daemon.config.schema import (
    Config,
    default_extent,
    default_socket,
    default_state,
    dotted_keys,
    load,
)
from kvtier_daemon.config.values import LOG_LEVELS, PAGE_BYTES, POLICIES


@pytest.fixture
def read(tmp_path):
    """Write a configuration file and load it, isolated from the environment of this process."""

    def read(text="", flags=None, environ=None, pieces=None):
        file = tmp_path / "kvtier.toml"
        file.write_text(text)
        for name, piece in (pieces or {}).items():
            (tmp_path / "conf.d").mkdir(exist_ok=True)
            (tmp_path / "conf.d" / name).write_text(piece)
        return load(file, flags, environ=environ or {}, uid=0)

    return read


WARM = '[warm]\nsize = "64GiB"\n'
COLD = '[cold]\ndirectories = ["/d"]\nsize = "1TiB"\n'


def test_only_a_size_is_required(read):
    config = read(WARM).config
    assert config.socket == Path("/run/kvtier/kvtier.sock")
    assert config.state == Path("/var/lib/kvtier")
    assert (config.socket_mode, config.socket_group) == (0o660, None)
    assert (config.log_level, config.max_clients) == ("info", 256)
    warm = config.warm
    assert (warm.size_bytes, warm.extent_bytes, warm.policy) == (64 * GIB, GIB, "auto")
    assert (warm.lock, warm.huge_pages) == (False, False)
    assert list(config.tenants) == ["default"]
    assert config.tenants["default"].uids == ("*",)
    assert config.tenants["default"].quota_bytes == 64 * GIB


def test_a_flag_alone_is_a_configuration():
    loaded = load(None, {"warm.size": "2GiB"}, environ={}, uid=0)
    assert loaded.config.warm.size_bytes == 2 * GIB
    assert loaded.origins["warm.size"] == "--warm-size"


def test_without_a_size_the_error_says_how_to_give_one(read):
    with pytest.raises(ConfigError, match=r"kvtier\.toml: warm\.size: is not set.*--warm-size"):
        read("")


def test_only_tenants_get_memory_of_gpus(read):
    assert read(WARM).config.hot.sizes == ()
    with pytest.raises(ConfigError, match=r"toml:4: hot\.sizes: 'b' is not a tenant; .* default"):
        read(f'{WARM}[hot]\nsizes = ["b=1GiB"]\n')


def test_every_key_can_be_written(read):
    me = pwd.getpwuid(0).pw_name
    config = read(
        'socket = "/tmp/a.sock"\nsocket_mode = "0666"\nsocket_group = 7\nstate = "/tmp/s"\n'
        'log_level = "debug"\nmax_clients = 3\nhistory = "2MiB"\n'
        '[warm]\nsize = "1GiB"\npolicy = "lru"\nextent = "128MiB"\nlock = true\nhuge_pages = true\n'
        'keep_s = 5\ncompressed = "64MiB"\n'
        '[cold]\ndirectories = ["/d/a", "/d/b"]\nsize = "64GiB"\nsegment = "512MiB"\ncodec = "raw"\n'
        'codecs = ["org/*=r32", "a = b=fix4"]\nprofiles = ["/p"]\n'
        'write = "through"\nengine = "threads"\ndaily_writes = "2TiB"\nscrub = "4MiB"\nstop_s = 30\n'
        'admission = "second-touch"\nencryption = "aes-256-gcm"\nkey_file = "/k"\n'
        '[remote]\nurl = "mooncake://m:50051"\nprotocol = "rdma"\ndevices = "mlx5_0,mlx5_1"\nprefix = "a/b"\n'
        'metadata = "http://m:8080/metadata"\nhost = "10.0.0.7"\nsegment = "64MiB"\n'
        'write = "all"\narchive = "used"\nwarm_up_percent = 7\nstop_s = 9\n'
        'codec = "raw"\ndeadline_s = 2\nbuffer = "16MiB"\n'
        'known = "4MiB"\nencryption = "aes-256-gcm"\nkey_file = "/r"\n'
        '[hot]\nsizes = ["a=8GiB", "b = 1GiB"]\n'
        '[http]\nlisten = "0.0.0.0:80"\nallow_remote = true\nhosts = ["gpu7.example"]\n'
        '[audit]\npath = "/var/log/a"\n'
        f'[tenants.a]\nuids = ["{me}", 7]\nwriters = ["@root", 8]\nquota = "40%"\n'
        "max_clients = 2\nweight = 3\ndirect_reads = true\ndirect_group = 7\n"
        '[tenants.b]\nreaders = ["*"]\nquota = "256MiB"\n'
    ).config
    assert msgspec.to_builtins(config, enc_hook=str) == {
        "socket": "/tmp/a.sock",
        "socket_mode": 0o666,
        "socket_group": 7,
        "state": "/tmp/s",
        "log_level": "debug",
        "max_clients": 3,
        "history": 2 * MIB,
        "warm": {
            "size": GIB,
            "policy": "lru",
            "extent": 128 * MIB,
            "lock": True,
            "huge_pages": True,
            "keep_s": 5,
            "compressed": 64 * MIB,
        },
        "cold": {
            "directories": ("/d/a", "/d/b"),
            "size": 64 * GIB,
            "segment": 512 * MIB,
            "codec": "raw",
            "codecs": (("org/*", "r32"), ("a = b", "fix4")),
            "profiles": ("/p",),
            "write": "through",
            "engine": "threads",
            "admission": "second-touch",
            "daily_writes": 2048 * GIB,
            "scrub": 4 * MIB,
            "stop_s": 30,
            "encryption": "aes-256-gcm",
            "key_file": "/k",
        },
        "remote": {
            "bucket": "",
            "url": "mooncake://m:50051",
            "protocol": "rdma",
            "devices": "mlx5_0,mlx5_1",
            "metadata": "http://m:8080/metadata",
            "host": "10.0.0.7",
            "segment": 64 * MIB,
            "prefix": "a/b",
            "endpoint": "",
            "region": "us-east-1",
            "credentials": None,
            "write": "all",
            "archive": "used",
            "warm_up_percent": 7,
            "reshard": False,
            "stop_s": 9,
            "codec": "raw",
            "deadline_s": 2,
            "buffer": 16 * MIB,
            "known": 4 * MIB,
            "encryption": "aes-256-gcm",
            "key_file": "/r",
        },
        "hot": {"sizes": (("a", 8 * GIB), ("b", GIB))},
        "http": {"listen": ("0.0.0.0", 80), "allow_remote": True, "hosts": ("gpu7.example",)},
        "audit": {"path": "/var/log/a"},
        "tenants": {
            "a": {
                "uids": (0, 7),
                "writers": ("@0", 8),
                "readers": (),
                "max_clients": 2,
                "weight": 3,
                "direct_reads": True,
                "direct_group": 7,
                "quota": GIB * 2 // 5 // PAGE_BYTES * PAGE_BYTES,
            },
            "b": {
                "uids": (),
                "writers": (),
                "readers": ("*",),
                "max_clients": None,
                "weight": 1,
                "direct_reads": False,
                "direct_group": None,
                "quota": 256 * MIB,
            },
        },
    }


# --- precedence -----------------------------------------------------------------------------------


def test_each_source_overrides_the_one_before_it(read):
    pieces = {"20-b.toml": "max_clients = 3", "10-a.toml": "max_clients = 2\nlog_level = 'debug'"}
    sources = {"text": "max_clients = 1\n" + WARM}
    assert read(**sources).config.max_clients == 1
    sources["pieces"] = pieces
    loaded = read(**sources)
    assert (loaded.config.max_clients, loaded.config.log_level) == (3, "debug")
    assert Path(loaded.origins["max_clients"]).name == "20-b.toml"
    assert Path(loaded.origins["log_level"]).name == "10-a.toml"
    sources["environ"] = {"KVTIER_MAX_CLIENTS": "4"}
    assert read(**sources).config.max_clients == 4
    sources["flags"] = {"max_clients": 5, "log_level": None}
    loaded = read(**sources)
    assert (loaded.config.max_clients, loaded.config.log_level) == (5, "debug")
    assert loaded.origins["max_clients"] == "--max-clients"


def test_a_bucket_is_configured_with_its_own_keys(read):
    text = '[remote]\nbucket = "blocks"\nendpoint = "https://s3:9000"\nregion = "eu"\ncredentials = "/c"\n'
    remote = read(WARM + text).config.remote
    assert (remote.bucket, remote.endpoint) == ("blocks", "https://s3:9000")
    assert (remote.region, remote.credentials, remote.url) == ("eu", Path("/c"), "")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('prefix = "a"', r"remote\.bucket: is not set; write bucket = .*, or url = "),
        (
            'bucket = "b1"\nurl = "mooncake://m:1"',
            r"remote\.bucket: cannot be used with remote\.url",
        ),
        ('bucket = "b1"\nsegment = "1GiB"', r"remote\.segment: cannot be used with remote\.bucket"),
        (
            'url = "mooncake://m:1"\nreshard = true',  # descriptions are found by a list
            r"remote\.reshard: cannot be used with remote\.url",
        ),
        ('url = "mooncake://m"', r"remote\.url: .*mooncake://store\.example:50051"),
    ],
)
def test_a_remote_store_is_of_one_kind(read, text, error):
    with pytest.raises(ConfigError, match=error):
        read(WARM + f"[remote]\n{text}\n")


def test_every_settled_key_has_an_origin(read):
    loaded = read(WARM + '[tenants.a]\nuids = ["*"]', environ={"KVTIER_WARM__LOCK": "yes"})
    expected = {key.replace("NAME", "a") for key in dotted_keys()}
    without = {key for key in expected if key.startswith(("cold.", "remote.", "http."))}
    assert set(loaded.origins) == expected - without, (
        "there is none of these unless somebody says so"
    )
    both = (
        COLD
        + '[remote]\nbucket = "blocks"\n[http]\nlisten = "127.0.0.1:1"\n[tenants.a]\nuids = ["*"]'
    )
    assert set(read(WARM + both).origins) == expected
    assert loaded.origins["warm.lock"] == "environment KVTIER_WARM__LOCK"
    assert loaded.origins["warm.policy"] == loaded.origins["tenants.a.quota"] == "default"
    assert loaded.origins["tenants.a.uids"].endswith("kvtier.toml")


def test_the_environment_speaks_text(read):
    loaded = read(
        environ={
            "KVTIER_SOCKET": "/tmp/x.sock",
            "KVTIER_WARM__SIZE": "1 GiB",
            "KVTIER_WARM__LOCK": "true",
            "KVTIER_TENANTS__TEAM_A__UIDS": "1000, 1001,*",
            "KVTIER_TENANTS__TEAM_A__QUOTA": "50%",
            "HOME": "/root",
        }
    )
    assert loaded.config.socket == Path("/tmp/x.sock")
    assert loaded.config.warm.lock is True
    assert loaded.config.tenants["team_a"].uids == (1000, 1001, "*")
    assert loaded.config.tenants["team_a"].quota_bytes == GIB // 2


def test_variables_of_other_parts_and_of_kubernetes_are_not_keys(read):
    read(
        WARM,
        environ={
            "KVTIER_CPU": "scalar",
            "KVTIER_DEVICE": "gpu",
            "KVTIER_TEST_CACHE": "/tmp/cache",
            "KVTIER_PORT": "tcp://10.0.0.1:80",
            "KVTIER_PORT_80_TCP_ADDR": "10.0.0.1",
            "KVTIER_SERVICE_HOST": "10.0.0.1",
            "XKVTIER_FOO": "1",
        },
    )


def test_a_typo_in_the_environment_is_an_error(read):
    with pytest.raises(
        ConfigError,
        match=r"^environment KVTIER_WARM__SISE: warm\.sise: unknown key; did you mean KVTIER_WARM__SIZE\?$",
    ):
        read(WARM, environ={"KVTIER_WARM__SISE": "1GiB"})


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("KVTIER_WARM_SIZE", "unknown key; did you mean KVTIER_WARM__SIZE?"),
        ("KVTIER_WARM_HUGE_PAGES", "unknown key; did you mean KVTIER_WARM__HUGE_PAGES?"),
        ("KVTIER_WARM___SIZE", "unknown key; did you mean KVTIER_WARM__SIZE?"),
        ("KVTIER_SOCKET__MODE", "got a section; did you mean KVTIER_SOCKET_MODE?"),
        ("KVTIER_SOKET", "unknown key; did you mean KVTIER_SOCKET?"),
        ("KVTIER_LOCK", "unknown key; did you mean KVTIER_WARM__LOCK?"),
        ("KVTIER_TENANTS_A_UIDS", "unknown key; did you mean KVTIER_TENANTS__NAME__UIDS?"),
        ("KVTIER_TENANTS__A_UIDS", "got '1'; did you mean KVTIER_TENANTS__NAME__UIDS?"),
    ],
)
def test_a_variable_with_the_wrong_underscores_is_refused_with_the_right_one(read, variable, hint):
    with pytest.raises(ConfigError) as caught:
        read(WARM, environ={variable: "1"})
    assert str(caught.value).startswith(f"environment {variable}: ")
    assert str(caught.value).endswith(hint)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[warm]\nsise = "1GiB"', "warm.sise: unknown key; did you mean warm.size?"),
        ('sockt = "/a"', "sockt: unknown key; did you mean socket?"),
        ('size = "4GiB"', "size: unknown key; did you mean warm.size?"),
        ("lock = true", "lock: unknown key; did you mean warm.lock?"),
        ("[wram]\nsize = 1", "wram: unknown section; did you mean warm?"),
        (
            "[ram]\nsize = '2TiB'",
            "ram: unknown section; known: audit, cold, hot, http, remote, tenants, warm",
        ),
        ("[disk]", "disk: unknown section; known: audit, cold, hot, http, remote, tenants, warm"),
        ("[tenants.a]\nuid = [1]", "tenants.a.uid: unknown key; did you mean tenants.a.uids?"),
        ('"a\\nb" = 1', '"a\\nb": unknown key; known: '),
        ("warm = 5", "warm: expected a section, got 5"),
        ("[hot]\nsizes = ['1GiB']", "hot.sizes: '1GiB' is not TENANT=SIZE"),
        ("[hot]\nsizes = ['a=1GiB', 'a=2GiB']", "hot.sizes: a is listed twice"),
        ("[hot]\nsizes = ['a=1KiB']", "hot.sizes: 1 KiB is less than 1 MiB"),
        ("tenants.a = 5", "tenants.a: expected a section, got 5"),
        ("[socket]", "socket: expected an absolute path, got a section"),
        ("[socket]\na = 1", "socket: expected an absolute path, got a section"),
        ("[warm]\nsize = true", "warm.size: expected a size such as 64GiB"),
        ("[warm]\nsize = 1.5", "warm.size: expected a size such as 64GiB"),
        ("[warm]\nsize = 64", "warm.size: 64 B is less than 1 MiB"),
        ("[warm]\nsize = '64G'", "warm.size: '64G' is ambiguous"),
        (
            "[warm]\npolicy = 'lur'",
            "warm.policy: expected a known policy: lru, lfu, arc, s3fifo, prefix, attention, value,"
            " auto, got 'lur'",
        ),
        ("[warm]\nlock = 1", "warm.lock: expected true or false, got 1"),
        ("[warm]\nextent = 12", "warm.extent: 12 B is less than 4 KiB"),
        ("socket = 'here.sock'", "socket: expected an absolute path, got 'here.sock'"),
        ("socket = ''", "socket: expected an absolute path, got ''"),
        ("state = '~no-such-user-here/x'", "state: unknown user"),
        ("socket_mode = 0o660", 'socket_mode: expected octal digits in quotes, such as "0660"'),
        ("socket_mode = '0880'", "socket_mode: expected octal digits in quotes"),
        ("socket_mode = '0060'", "socket_mode: the owner needs rw"),
        (
            "socket_group = 'no-such-group-here'",
            "socket_group: group 'no-such-group-here' does not exist",
        ),
        ("log_level = 'loud'", "log_level: expected one of debug, info, warning, error"),
        ("max_clients = 0", "max_clients: expected a number from 1 to 65536, got 0"),
        ("max_clients = true", "max_clients: expected a number from 1 to 65536, got true"),
        ("[tenants.a]\nuids = []", 'tenants.a.uids: expected a list of "*"'),
        ("[tenants.a]\nuids = [-1]", 'tenants.a.uids: expected a list of "*"'),
        ("[tenants.a]\nuids = [true]", 'tenants.a.uids: expected a list of "*"'),
        (
            "[tenants.a]\nuids = ['no-such-user']",
            "tenants.a.uids: user 'no-such-user' does not exist",
        ),
        ("[tenants.a]\nquota = '120%'", "tenants.a.quota: '120%' is not a share"),
        ("[tenants.'A/../b']\nuids = [1]", 'tenants."A/../b": expected a name of up to 32'),
        ("=", "invalid TOML: "),
        ("a = " + "[" * 100_000, "invalid TOML: nested too deeply"),
    ],
)
def test_an_error_names_the_file_the_key_and_what_was_expected(read, tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        read(text)
    file = re.escape(str(tmp_path / "kvtier.toml"))
    assert re.match(rf"{file}(:[12])?: {re.escape(message)}", str(caught.value))
    assert "\n" not in str(caught.value)


def test_all_errors_are_reported_together_each_with_its_place(read, tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(
            "max_client = 3\nlog_level = 'loud'\n[warm]\nsise = '1GiB'\n[disk]\na = 1\nb = 2\n",
            pieces={"1.toml": "=", "2.toml": "[warm]\nlok = true"},
            environ={"KVTIER_WARM_EXTENT": "1GiB"},
            flags={"warm.size": "64G"},
        )
    file, pieces = tmp_path / "kvtier.toml", tmp_path / "conf.d"
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("8 errors in the configuration: (1) ")
    for one in (
        f"{pieces}/1.toml: invalid TOML: ",
        f"{file}:1: max_client: unknown key; did you mean max_clients?",
        f"{file}:2: log_level: expected one of",
        f"{file}:4: warm.sise: unknown key; did you mean warm.size?",
        f"{file}: disk: unknown section; known: audit, cold, hot, http, remote, tenants, warm",
        f"{pieces}/2.toml:2: warm.lok: unknown key; did you mean warm.lock?",
        "environment KVTIER_WARM_EXTENT: warm_extent: unknown key; did you mean KVTIER_WARM__EXTENT?",
        "--warm-size: warm.size: '64G' is ambiguous",
    ):
        assert text.count(f") {one}") == 1, one


def test_a_misspelt_size_is_not_also_reported_as_missing(read):
    with pytest.raises(ConfigError, match=r"toml:2: warm\.sise: [^:]*$"):
        read("[warm]\nsise = '1GiB'")


def test_all_inconsistencies_are_reported_together(read):
    tenants = "[tenants.a]\n[tenants.b]\nuids = [1]\n[tenants.c]\nuids = [1]\n"
    with pytest.raises(ConfigError) as caught:
        read(tenants)
    for one in (
        "warm.size: is not set",
        "tenants.a.uids: is not set",
        "tenants.c.uids: uid 1 already",
    ):
        assert one in str(caught.value)


def test_a_missing_file_and_a_file_that_is_not_text_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "absent.toml", environ={})
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bad\.toml: invalid TOML: .*utf-8"):
        load(tmp_path / "bad.toml", environ={})


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "marked.toml"
    file.write_text('[warm]\nsize = "8MiB"\n', encoding="utf-8-sig")
    assert load(file, environ={}).config.warm.size_bytes == 8 * MIB
    file.write_text('[warm]\nsize = "8QiB"\n', encoding="utf-8-sig")
    with pytest.raises(ConfigError, match=r"marked\.toml:2: warm\.size: "):
        load(file, environ={})


def test_a_file_may_be_a_pipe_but_not_one_without_an_end(tmp_path):
    file = tmp_path / "pipe.toml"
    os.mkfifo(file)

    def write(text):
        with contextlib.suppress(BrokenPipeError), file.open("w") as opened:
            opened.write(text)

    with ThreadPoolExecutor(1) as writer:
        written = writer.submit(write, WARM)
        assert load(file, environ={}).config.warm.size_bytes == 64 * GIB
        written.result()
        written = writer.submit(write, WARM + "#" * (2 << 20))
        with pytest.raises(
            ConfigError, match=r"pipe\.toml: cannot be read: it has more than 1 MiB"
        ):
            load(file, environ={})


def test_an_error_in_a_piece_names_the_piece(read):
    with pytest.raises(ConfigError, match=r"conf\.d/9\.toml:2: warm\.sise: unknown key"):
        read(WARM, pieces={"9.toml": "[warm]\nsise = 1"})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    ),
    st.sampled_from(sorted(dotted_keys())),
)
def test_a_bad_value_of_any_key_is_a_configuration_error(value, key):
    try:
        flags = {"warm.size": "1GiB", "tenants.a.uids": "*", key.replace("NAME", "a"): value}
        loaded = load(None, flags, environ={}, uid=0)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert loaded.config.warm.size_bytes >= MIB


# --- the arena ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "extent"),
    [
        (MIB, MIB),
        (64 * MIB, 64 * MIB),
        (512 * MIB, 64 * MIB),
        (2 * GIB, 128 * MIB),
        (16 * GIB, GIB),
        (64 * GIB, GIB),
        (2 * TIB, 32 * GIB),
    ],
)
def test_the_extent_follows_the_size(size, extent):
    assert default_extent(size) == extent


@given(st.integers(MIB, 1 << 50))
def test_extents_are_whole_pages_and_never_many(size):
    extent = default_extent(size)
    assert extent % PAGE_BYTES == 0
    assert 0 < extent <= size
    assert size // extent <= 64 + 1


def test_the_default_extent_fits_the_smallest_tenant(read):
    tenants = '[tenants.a]\nuids = [1]\nquota = "1%"\n[tenants.b]\nuids = [2]\nquota = "50%"'
    warm = read('[warm]\nsize = "1GiB"\n' + tenants).config.warm
    assert warm.extent_bytes == GIB // 100 // PAGE_BYTES * PAGE_BYTES


def test_an_extent_larger_than_a_tenants_quota_is_an_error(read):
    with pytest.raises(ConfigError, match=r"warm\.extent: 1 GiB is more than tenants\.a\.quota"):
        read(WARM + 'extent = "1GiB"\n[tenants.a]\nuids = [1]\nquota = "1%"')


def test_an_extent_larger_than_the_tier_is_an_error(read):
    with pytest.raises(ConfigError, match=r"warm\.extent: 65 GiB is more than warm\.size 64 GiB"):
        read(WARM + 'extent = "65GiB"')


def test_huge_pages_make_whole_huge_extents(read):
    warm = read('[warm]\nsize = "1GB"\nhuge_pages = true\nextent = "100MB"').config.warm
    assert warm.extent_bytes % (2 * MIB) == 0
    assert 98_000_000 < warm.extent_bytes <= 100_000_000


def test_an_extent_below_a_huge_page_is_an_error_if_huge_pages_are_configured(read):
    with pytest.raises(ConfigError, match=r"warm\.extent: 1 MiB is less than a huge page"):
        read(WARM + 'huge_pages = true\nextent = "1MiB"')


def test_decimal_sizes_become_whole_pages(read):
    warm = read('[warm]\nsize = "1GB"').config.warm
    assert warm.size_bytes % PAGE_BYTES == warm.extent_bytes % PAGE_BYTES == 0
    assert 0 <= 10**9 - warm.size_bytes < PAGE_BYTES


# --- tenants --------------------------------------------------------------------------------------


def member(config: Config, uid: int, *groups: int) -> tuple[str, str] | None:
    found = member_of(config, uid, groups)
    return (found.tenant, str(found.role)) if found else None


def test_a_user_named_exactly_is_found_before_everyone(read):
    config = read(
        WARM + '[tenants.all]\nuids = ["*"]\nquota = "10%"\n'
        '[tenants.a]\nuids = [1000, 1001]\nquota = "90%"'
    ).config
    assert member(config, 1000) == member(config, 1001) == ("a", "admin")
    assert member(config, 0) == member(config, 65534) == ("all", "admin")


def test_a_list_gives_its_users_a_role_and_a_name_precedes_groups_and_everyone(read):
    config = read(
        WARM
        + '[tenants.a]\nuids = [1]\nwriters = [2, "@50"]\nreaders = ["@51", "@52", 4]\nquota = "50%"\n'
        '[tenants.b]\nreaders = ["*"]\nwriters = ["@60"]\nquota = "50%"'
    ).config
    assert member(config, 1, 60) == ("a", "admin")
    assert member(config, 2) == member(config, 9, 50) == ("a", "write")
    assert member(config, 4, 50) == ("a", "read"), "the user is named, the group is not considered"
    assert member(config, 9, 51) == ("a", "read")
    assert member(config, 9, 51, 50) == ("a", "write"), "the highest role of its groups"
    assert member(config, 9) == member(config, 9, 99) == ("b", "read")
    assert member(config, 9, 50, 60) is None, "its groups belong to two tenants"


def test_a_user_in_no_tenants_list_has_no_tenant(read):
    config = read(WARM + "[tenants.a]\nuids = [1000]\nreaders = ['@7']").config
    assert member(config, 1001) is None and member(config, 7) is None


def test_root_is_no_exception(read):
    config = read(WARM + "[tenants.a]\nuids = [1000]").config
    assert member(config, 0) is None


@pytest.mark.parametrize("key", ["writers", "readers"])
def test_a_user_with_two_roles_is_an_error(read, key):
    with pytest.raises(
        ConfigError, match=rf"tenants\.a\.{key}: uid 7 is already in tenants\.a\.uids"
    ):
        read(f"{WARM}[tenants.a]\nuids = [1, 7]\n{key} = [7]")


@pytest.mark.parametrize(
    ("a", "b"), [("[1, 7]", "[7]"), ('["@7"]', '["@7"]'), ('["*"]', '["*"]'), ('["root"]', "[0]")]
)
def test_a_user_of_two_tenants_is_an_error(read, a, b):
    with pytest.raises(ConfigError, match=r"tenants\.b\.uids: .* already belongs to tenant a"):
        read(f'{WARM}[tenants.a]\nuids = {a}\nquota = "1%"\n[tenants.b]\nuids = {b}\nquota = "1%"')


def test_quotas_that_exceed_the_size_are_an_error_with_the_numbers(read):
    with pytest.raises(ConfigError, match=r"sum to 110% of warm\.size 64 GiB \(a 60%, b 50%\)"):
        read(
            WARM + '[tenants.a]\nuids = [1]\nquota = "60%"\n[tenants.b]\nuids = [2]\nquota="32GiB"'
        )


def test_limits_of_clients_leave_one_for_each_other_tenant(read):
    tenants = '[tenants.b]\nuids = [2]\nquota = "1%"\n[tenants.a]\nuids = [1]\nquota = "1%"\nmax_clients = '
    assert read("max_clients = 8\n" + WARM + tenants + "7").config.tenants["a"].max_clients == 7
    with pytest.raises(ConfigError, match=r"max_clients: 8 is less than 9"):
        read("max_clients = 8\n" + WARM + tenants + "8")


def test_a_quota_larger_than_the_tier_is_an_error(read):
    with pytest.raises(ConfigError, match=r"sum to 200% of warm\.size"):
        read(WARM + '[tenants.a]\nuids = [1]\nquota = "128GiB"')


def test_a_tenant_without_users_is_kept(read):
    with pytest.raises(ConfigError, match=r"tenants\.a\.uids: is not set"):
        read(WARM + "[tenants.a]")


def test_a_tenant_may_be_spread_over_files(read):
    loaded = read(WARM + "[tenants.a]\nuids = [1]", pieces={"a.toml": "[tenants.a]\nquota = '25%'"})
    assert loaded.config.tenants["a"].quota_bytes == 16 * GIB


# --- places ---------------------------------------------------------------------------------------


def test_root_and_users_have_their_own_places(monkeypatch):
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/0"}, 0) == Path("/run/kvtier/kvtier.sock")
    user = {"XDG_RUNTIME_DIR": "/run/user/7", "XDG_STATE_HOME": "/home/a/state", "HOME": "/home/a"}
    assert default_socket(user, 7) == Path("/run/user/7/kvtier/kvtier.sock")
    assert default_state(user, 7) == Path("/home/a/state/kvtier")
    assert default_state({"HOME": "/home/a"}, 7) == Path("/home/a/.local/state/kvtier")
    monkeypatch.setattr("tempfile.tempdir", "/tmp/elsewhere")
    assert default_socket({}, 7) == Path("/tmp/elsewhere/kvtier-7/kvtier.sock")
    assert default_socket({"XDG_RUNTIME_DIR": "x"}, 7).parent == Path("/tmp/elsewhere/kvtier-7")
    assert default_state({}, 7) == Path("/tmp/elsewhere/kvtier-7/state")


def test_a_path_may_begin_at_home(read, monkeypatch):
    monkeypatch.setenv("HOME", "/home/a")
    assert read(WARM, flags={"state": "~/kv"}).config.state == Path("/home/a/kv")


def test_the_default_source_is_the_environment_of_the_process(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("KVTIER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVTIER_WARM__SIZE", "8MiB")
    loaded = load(None)
    assert loaded.config.warm.size_bytes == 8 * MIB
    assert loaded.config.socket == default_socket(os.environ, os.geteuid())


# --- the document ---------------------------------------------------------------------------------


def test_the_document_lists_exactly_the_existing_keys():
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    listed = re.findall(r"^\| `([^`]+)` \|", page.read_text(), re.MULTILINE)
    assert listed == list(dotted_keys())


def test_the_document_names_every_policy_and_level():
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    for name in (*POLICIES, *LOG_LEVELS):
        assert f"`{name}`" in page


def test_the_documents_example_loads(read):
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert set(read(example.replace('"vllm"', "1000")).config.tenants) == {"serving", "default"}


# --- who may read the metrics
# -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "settled"),
    [
        ("127.0.0.1:9410", ("127.0.0.1", 9410)),
        ("127.9.9.9:0", ("127.9.9.9", 0)),
        ("[::1]:9410", ("::1", 9410)),
        ("[0:0:0:0:0:0:0:1]:1", ("::1", 1)),
    ],
)
def test_metrics_on_a_loopback_address_need_no_permission(read, listen, settled):
    assert read(WARM).config.http is None
    assert read(WARM + "[http]\n").config.http is None
    http = read(WARM + f'[http]\nlisten = "{listen}"\n').config.http
    assert (http.listen, http.allow_remote, http.hosts) == (settled, False, ())


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:9410", "10.0.0.1:9410", "[::]:9410", "[::ffff:10.0.0.1]:1"]
)
def test_metrics_on_other_addresses_need_a_permission(read, listen):
    with pytest.raises(
        ConfigError,
        match=r"http\.listen: .* can be reached from other machines.*allow_remote = true",
    ):
        read(WARM + f'[http]\nlisten = "{listen}"\n')
    assert (
        read(WARM + f'[http]\nlisten = "{listen}"\nallow_remote = true\n').config.http is not None
    )


@pytest.mark.parametrize(
    "listen", ['"9410"', '":9410"', '"localhost:9410"', '"127.0.0.1"', '"127.0.0.1:65536"', '"::1:9410"',
               "9410",
               '"256.0.0.1:1"', '"127.0.0.1:-1"', '"[::1"', '"127.0.0.1:9410 "'],
)  # fmt: skip
def test_an_invalid_address_is_refused(read, listen):
    with pytest.raises(
        ConfigError, match=r"http\.listen: .*expected an address and a port such as 127"
    ):
        read(WARM + f"[http]\nlisten = {listen}\n")


def test_a_permission_without_an_address_is_refused(read):
    with pytest.raises(
        ConfigError, match=r"http\.listen: is not set; write listen = .127\.0\.0\.1:9410"
    ):
        read(WARM + "[http]\nallow_remote = true\n")
    with pytest.raises(ConfigError, match="'a b' is not a host name"):
        read(WARM + '[http]\nlisten = "127.0.0.1:1"\nhosts = ["a b"]\n')


# --- the cold tier --------------------------------------------------------------------------------


def test_segments_are_small_enough_for_every_tenant(read):
    assert read(WARM).config.cold is None
    assert read(WARM + COLD).config.cold.segment_bytes == GIB
    assert read(WARM + COLD).config.cold.scrub_bytes == 16 * MIB
    assert read(WARM + COLD + 'scrub = "0"').config.cold.scrub_bytes == 0
    small = '[cold]\ndirectories = ["/d", "/e"]\nsize = "16GiB"\n'
    assert read(WARM + small).config.cold.segment_bytes == 256 * MIB
    tenants = '[tenants.a]\nuids = [1]\nquota = "1%"\n[tenants.b]\nuids = ["*"]\nquota = "99%"\n'
    cold = COLD.replace("1TiB", "256GiB")
    segment = read(WARM + cold + tenants).config.cold.segment_bytes
    assert 256 * GIB // 100 // 8 >= segment > 256 * GIB // 100 // 8 - MIB


def test_the_smallest_tenant_has_room_for_four_segments_in_each_directory(read):
    shares = '[tenants.a]\nuids = [1]\nquota = "4GiB"\n[tenants.b]\nuids = ["*"]\nquota = "60GiB"\n'

    def segment_of(size):
        cold = '[cold]\ndirectories = ["/d", "/e"]\nsegment = "1MiB"\n'
        return read(WARM + cold + f'size = "{size}"\n' + shares).config.cold.segment_bytes

    assert segment_of(128 * MIB) == MIB
    with pytest.raises(
        ConfigError, match=r"cold\.size: 128 MiB is too little.*4 segments of 1 MiB"
    ):
        segment_of(128 * MIB - 1)


@pytest.mark.parametrize(
    "text, expected",
    [
        ('[cold]\nsize = "1TiB"', "cold.directories: is not set"),
        ('[cold]\ndirectories = ["/d"]', "cold.size: is not set"),
        ('[cold]\ndirectories = []\nsize = "1TiB"', "cold.directories: expected a list of absolute"),
        ('[cold]\ndirectories = ["/d", "/d"]\nsize = "1TiB"', "cold.directories: a directory is listed"),
        ('[cold]\ndirectories = ["d"]\nsize = "1TiB"', "cold.directories: expected a list of absolute"),
        (COLD + 'segment = "32GiB"', "cold.segment: 32 GiB is more than 1/64 of cold.size"),
        ('[cold]\ndirectories = ["/d"]\nsize = "2MiB"', "cold.size: 2 MiB is too little"),
        (COLD + 'write = "around"', "cold.write: expected one of back, through"),
        (COLD + "daily_writes = 700", "daily_writes: 700 B is less than 4 KiB; expected a size such"),
        (COLD + 'daily_writes = "0.5KiB"', "cold.daily_writes: 512 B is less than 4 KiB"),
        (COLD + 'scrub = "4095"', "cold.scrub: 4.00 KiB is less than a page"),
        (COLD + 'scrub = "fast"', "expected bytes a second such as 16MiB, or 0 for none"),
        (COLD + 'codec = "zip"', "cold.codec: expected a known codec: auto, raw"),
        (COLD + 'codecs = ["m=zip"]', "cold.codecs: 'm=zip' is not MODEL=CODEC"),
        (COLD + 'codec = "q8"', 'cold.codec: q8 is lossy and must be configured by model: under [cold]'),
        (COLD + 'codecs = ["m=ecsq"]', "cold.codecs: 'm=ecsq' is not MODEL=CODEC"),
        (COLD + 'codecs = ["r32"]', "cold.codecs: 'r32' is not MODEL=CODEC"),
    ],
)  # fmt: skip
def test_an_impossible_cold_tier_is_an_error(read, text, expected):
    with pytest.raises(ConfigError) as error:
        read(WARM + text)
    assert expected in str(error.value)


def test_compressed_memory_needs_a_disk(read):
    with pytest.raises(ConfigError, match=r"warm\.compressed: needs \[cold\]"):
        read(WARM + 'compressed = "8GiB"\n')
    assert read(WARM + 'compressed = "8GiB"\n' + COLD).config.warm.compressed_bytes == 8 * GIB
    assert read(WARM + "compressed = 0\n").config.warm.compressed_bytes == 0
