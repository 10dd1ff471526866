//! Tests that the options, the service file, the environment and the defaults give the same result as in libpq.

use super::*;
use std::collections::HashMap;

#[derive(Default)]
struct FakeEnvironment {
    variables: HashMap<&'static str, &'static str>,
    files: HashMap<&'static str, &'static str>,
}

impl FakeEnvironment {
    fn with(variables: &[(&'static str, &'static str)], files: &[(&'static str, &'static str)]) -> Self {
        Self {
            variables: variables.iter().copied().collect(),
            files: files.iter().copied().collect(),
        }
    }
}

fn target(args: &ConnectArgs, around: &FakeEnvironment) -> Result<ConnectTarget, Failure> {
    let file = |path: &Path| around.files.get(path.to_str().expect("UTF-8")).copied();
    let around = Surroundings {
        variable: &|name| around.variables.get(name).map(|value| (*value).to_owned()),
        read: &|path| {
            file(path)
                .map(str::to_owned)
                .ok_or_else(|| io::ErrorKind::NotFound.into())
        },
        exists: &|path| file(path).is_some(),
        home: Some("/home/me".into()),
        os_user: Ok("me".into()),
    };
    super::target(args, &around)
}

fn args(dbname: &str) -> ConnectArgs {
    ConnectArgs {
        dbname: Some(dbname.to_owned()).filter(|name| !name.is_empty()),
        ..ConnectArgs::default()
    }
}

fn of(dbname: &str, around: &FakeEnvironment) -> ConnectTarget {
    target(&args(dbname), around).unwrap_or_else(|failure| panic!("{dbname}: {failure}"))
}

fn refused(dbname: &str, around: &FakeEnvironment) -> String {
    let failure = target(&args(dbname), around).expect_err(dbname);
    assert!(matches!(failure.code, Code::Usage | Code::CannotConnect));
    failure.to_string()
}

fn network(name: &str, port: u16) -> ServerAddress {
    ServerAddress {
        host: Host::Tcp(name.into()),
        address: None,
        port,
    }
}

fn socket(path: &str, port: u16) -> ServerAddress {
    ServerAddress {
        host: Host::Unix(path.into()),
        address: None,
        port,
    }
}

#[test]
fn a_database_is_named_alone_with_its_hosts_and_with_their_ports() {
    for (dbname, wanted) in [
        ("shop", ["shop", "shop@localhost", "shop@localhost:5432"]),
        ("host=/tmp/pg port=1 dbname=a", ["a", "a@/tmp/pg", "a@/tmp/pg:1"]),
        (
            "postgresql://kim:secret@b,c:2/shop",
            ["shop", "shop@b,c", "shop@b:5432,c:2"],
        ),
    ] {
        assert_eq!(of(dbname, &FakeEnvironment::default()).names(), wanted);
    }
}

#[test]
fn the_defaults_are_the_socket_and_the_name_of_the_user() {
    let target = of("", &FakeEnvironment::default());
    assert_eq!(target.hosts, [socket("/var/run/postgresql", 5432)]);
    assert_eq!(
        (target.config.get_user(), target.config.get_dbname()),
        (Some("me"), Some("me"))
    );
    assert_eq!(target.tls.mode, SslMode::Prefer);
    assert_eq!(target.config.get_application_name(), Some("outboxctl"));
    // The socket of a server built with the defaults of the Postgres project.
    let target = of("port=5433", &FakeEnvironment::with(&[], &[("/tmp/.s.PGSQL.5433", "")]));
    assert_eq!(target.hosts, [socket("/tmp", 5433)]);
    let target = of("user=you", &FakeEnvironment::default());
    assert_eq!(target.config.get_dbname(), Some("you"));
}

#[test]
fn a_connection_string_overrides_options_and_options_override_the_rest() {
    let around = FakeEnvironment::with(
        &[
            ("PGSERVICE", "s"),
            ("PGHOST", "of-env"),
            ("PGPORT", "4"),
            ("PGUSER", "of-env"),
            ("PGDATABASE", "of-env"),
            ("PGAPPNAME", "of-env"),
        ],
        &[(
            "/home/me/.pg_service.conf",
            "[s]\nhost=of-service\nport=3\nuser=of-service\ndbname=of-service\n",
        )],
    );
    let given = ConnectArgs {
        dbname: Some("host=of-string".into()),
        host: Some("of-option".into()),
        port: Some("2".into()),
        ..ConnectArgs::default()
    };
    let target = target(&given, &around).expect("a target");
    assert_eq!(target.hosts, [network("of-string", 2)]);
    assert_eq!(target.config.get_user(), Some("of-service"));
    assert_eq!(target.config.get_dbname(), Some("of-service"));
    assert_eq!(target.config.get_application_name(), Some("of-env"));
}

#[test]
fn an_empty_variable_or_option_means_the_default() {
    let around = FakeEnvironment::with(
        &[("PGHOST", ""), ("PGDATABASE", ""), ("PGSERVICE", ""), ("PGUSER", "")],
        &[],
    );
    let given = ConnectArgs {
        host: Some(String::new()),
        ..args("dbname=''")
    };
    let target = target(&given, &around).expect("a target");
    assert_eq!(target.hosts, [socket("/var/run/postgresql", 5432)]);
    assert_eq!(target.config.get_dbname(), Some("me"));
}

#[test]
fn a_service_is_found_in_the_users_file_then_in_the_systems() {
    let files = [
        ("/home/me/.pg_service.conf", "[mine]\nhost=a\n"),
        (
            "/etc/postgresql-common/pg_service.conf",
            "[mine]\nhost=no\n[theirs]\nhost=b\n",
        ),
        ("/x", "[mine]\nhost=c"),
    ];
    let host = |service: &str, variables: &[(&'static str, &'static str)]| {
        of(&format!("service={service}"), &FakeEnvironment::with(variables, &files)).hosts
    };
    assert_eq!(host("mine", &[]), [network("a", 5432)]);
    assert_eq!(host("theirs", &[]), [network("b", 5432)]);
    assert_eq!(host("mine", &[("PGSERVICEFILE", "/x")]), [network("c", 5432)]);
    assert_eq!(host("mine", &[("PGSERVICE", "no")]), [network("a", 5432)]);
    let around = FakeEnvironment::with(&[], &files);
    assert!(refused("service=unknown", &around).contains("no service \"unknown\""));
    let gone = FakeEnvironment::with(&[("PGSERVICEFILE", "/gone"), ("PGSERVICE", "mine")], &files);
    assert!(refused("", &gone).contains("/gone"), "{}", refused("", &gone));
}

#[test]
fn hosts_keep_their_order() {
    let around = FakeEnvironment::default();
    let hosts = |text: &str| of(text, &around).hosts;
    assert_eq!(hosts("host=a,b port=1,2"), [network("a", 1), network("b", 2)]);
    assert_eq!(hosts("host=a,b port=7"), [network("a", 7), network("b", 7)]);
    assert_eq!(hosts("postgres://a,b:6/"), [network("a", 5432), network("b", 6)]);
    assert_eq!(hosts("host=/run/x,b"), [socket("/run/x", 5432), network("b", 5432)]);
    let addressed = hosts("host=name hostaddr=127.0.0.1");
    assert_eq!(addressed[0].host, Host::Tcp("name".into()));
    assert_eq!(addressed[0].address, Some([127, 0, 0, 1].into()));
    assert_eq!(hosts("hostaddr=::1")[0].passfile_host(), "::1");
    for text in [
        "host=a,b port=1,2,3",
        "host=a,b hostaddr=::1",
        "hostaddr=a",
        "port=0",
        "port=65536",
        "port=x",
        "host=@x",
    ] {
        refused(text, &around);
    }
}

#[test]
fn a_password_file_names_the_default_socket_localhost() {
    let wanted = |address: ServerAddress| address.passfile_host().to_owned();
    assert_eq!(wanted(socket("/var/run/postgresql", 1)), "localhost");
    assert_eq!(wanted(socket("/run/x", 1)), "/run/x");
    assert_eq!(wanted(network("h", 1)), "h");
}

#[test]
fn every_sslmode_is_known_and_verification_needs_trusted_certificates() {
    let around = FakeEnvironment::with(&[], &[("/etc/ssl/cert.pem", "")]);
    for (text, mode) in [
        ("sslmode=disable", SslMode::Disable),
        ("sslmode=allow", SslMode::Allow),
        ("sslmode=prefer", SslMode::Prefer),
        ("sslmode=require", SslMode::Require),
        ("sslmode=verify-ca sslrootcert=/ca", SslMode::VerifyCa),
        ("sslmode=verify-full sslrootcert=/ca", SslMode::VerifyFull),
        ("sslrootcert=system", SslMode::VerifyFull),
    ] {
        assert_eq!(of(text, &around).tls.mode, mode, "{text}");
    }
    let required = FakeEnvironment::with(&[("PGREQUIRESSL", "1")], &[]);
    assert_eq!(of("", &required).tls.mode, SslMode::Require);
    for text in [
        "sslmode=on",
        "sslmode=verify-full",
        "sslmode=require sslrootcert=system",
        "ssl_min_protocol_version=SSLv3",
    ] {
        refused(text, &around);
    }
    assert!(refused("sslmode=verify-ca", &around).contains("sslrootcert"));
    // The files are in the default directory of libpq.
    let home = FakeEnvironment::with(
        &[],
        &[
            ("/home/me/.postgresql/root.crt", ""),
            ("/home/me/.postgresql/postgresql.crt", ""),
        ],
    );
    let tls = of("sslmode=verify-full", &home).tls;
    assert_eq!(tls.roots, Some("/home/me/.postgresql/root.crt".into()));
    let (_, key) = tls.certificate.expect("the certificate of the user");
    assert_eq!(key, Path::new("/home/me/.postgresql/postgresql.key"));
    assert!(of("sslcertmode=disable", &home).tls.certificate.is_none());
    let only13 = of("ssl_min_protocol_version=TLSv1.3", &around).tls.versions;
    assert_eq!(only13, [&TLS13]);
    refused("ssl_max_protocol_version=TLSv1.1", &around);
}

#[test]
fn an_unsupported_parameter_that_makes_a_session_safer_is_refused() {
    let around = FakeEnvironment::default();
    for text in [
        "gssencmode=require",
        "requirepeer=postgres",
        "require_auth=scram-sha-256",
        "sslcrl=/crl",
        "sslpassword=x",
        "sslnegotiation=direct",
        "sslcertmode=require",
        "channel_binding=often",
        "target_session_attrs=fast",
        "connect_timeout=soon",
        "nonsense=1",
    ] {
        refused(text, &around);
    }
    of(
        "gssencmode=disable sslcompression=0 krbsrvname=x client_encoding=latin1",
        &around,
    );
}

#[test]
fn numbers_and_keywords_are_parsed() {
    let target = of(
        "connect_timeout=7 keepalives=0 keepalives_idle=3 tcp_user_timeout=1500 target_session_attrs=read-write channel_binding=require options='-c a=b'",
        &FakeEnvironment::with(&[("PGTZ", "Asia/Tokyo"), ("PGPASSWORD", "hunter2")], &[]),
    );
    let config = &target.config;
    assert_eq!(config.get_connect_timeout(), Some(&Duration::from_secs(7)));
    assert!(!config.get_keepalives());
    assert_eq!(config.get_keepalives_idle(), Duration::from_secs(3));
    assert_eq!(config.get_tcp_user_timeout(), Some(&Duration::from_millis(1500)));
    assert_eq!(target.session, SessionWanted::ReadWrite);
    assert_eq!(config.get_options(), Some("-c a=b"));
    assert_eq!(target.time_zone.as_deref(), Some("Asia/Tokyo"));
    assert_eq!(config.get_password(), Some(&b"hunter2"[..]));
    assert!(!format!("{target:?}").contains("hunter2"));
    assert_eq!(
        of("connect_timeout=0", &FakeEnvironment::default())
            .config
            .get_connect_timeout(),
        None
    );
}
