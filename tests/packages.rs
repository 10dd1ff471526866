//! Tests of the packages that `make deb` and `make rpm` build, and of the images that are made of them. They cover what
//! is in a package and on which systems it runs. apt installs the packages in a clean Debian, whose server delivers an
//! event.

use std::env::consts::ARCH;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

use support::process::{self, we_are_root};
use support::workdir::ServerDir;
use support::{Broker, Cluster, Installation, LONG, markdown, port, program};
use support::{all_of, exchange_and_queue, wait_until};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .canonicalize()
        .expect("the root")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The major of the server that the tests run.
fn major() -> String {
    let version = Installation::from_env().version();
    let digits = version.trim_start_matches("PostgreSQL ").chars();
    digits.take_while(char::is_ascii_digit).collect()
}

/// What a program prints. Panics if it fails.
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{printed}{errors}",
        output.status
    );
    printed
}

/// Makes the files of a release, once, of the programs that the tests run: no second build for a test. Returns the
/// packages of this kind, of the extension and of outboxctl.
fn packages(kind: &'static str) -> [PathBuf; 2] {
    static MADE: OnceLock<()> = OnceLock::new();
    MADE.get_or_init(|| {
        let library = |profile: &str| root().join(format!("target/pg{}/{profile}/liboutbox.so", major()));
        let modified = |profile| fs::metadata(library(profile)).and_then(|so| so.modified()).ok();
        let profile = if modified("debug") > modified("release") {
            "dev"
        } else {
            "release"
        };
        let installation = Installation::from_env();
        output(
            Command::new("make")
                .current_dir(root())
                .args(["release", "FLAGS=--dry-run"])
                .args(
                    ["PG_CONFIG", "RELEASE"].map(|name| format!("{name}={}", installation.bin("pg_config").display())),
                )
                .arg(format!("PROFILE={profile}"))
                .arg(format!("CTL={}", program::outboxctl().display())),
        );
    });
    names(kind).map(|name| {
        let file = root().join("target/packages").join(name);
        assert!(file.is_file(), "no {}", file.display());
        file
    })
}

/// The file names of the packages of this kind.
fn names(kind: &str) -> [String; 2] {
    let (major, version) = (major(), env!("CARGO_PKG_VERSION"));
    let deb = if ARCH == "aarch64" { "arm64" } else { "amd64" };
    match kind {
        "deb" => [format!("postgresql-{major}-outbox"), "outboxctl".into()]
            .map(|name| format!("{name}_{version}-1_{deb}.deb")),
        _ => [format!("outbox_{major}"), "outboxctl".into()].map(|name| format!("{name}-{version}-1.{ARCH}.rpm")),
    }
}

/// Unpacks both packages of this kind.
fn unpack(kind: &'static str) -> ServerDir {
    let directory = ServerDir::create(kind);
    for package in packages(kind) {
        let mut unpack = Command::new("sh");
        unpack.current_dir(directory.path()).arg("-c");
        unpack.arg(match kind {
            "deb" => "dpkg-deb --extract \"$0\" .",
            _ => "rpm2cpio \"$0\" | cpio --quiet -idm",
        });
        output(unpack.arg(package));
    }
    directory
}

/// The files below a directory, each with its mode, as `644 ./usr/bin/outboxctl`.
fn listing(directory: &Path) -> Vec<String> {
    let listing = output(
        Command::new("find")
            .current_dir(directory)
            .args([".", "-type", "f", "-printf", "%m %p\n"]),
    );
    listing.lines().map(str::to_owned).collect()
}

#[test]
fn each_package_has_its_files_licences_and_documents_with_their_modes() {
    let major = major();
    for (kind, extension, lib, share) in [
        (
            "deb",
            format!("postgresql-{major}-outbox"),
            format!("usr/lib/postgresql/{major}/lib"),
            format!("usr/share/postgresql/{major}/extension"),
        ),
        (
            "rpm",
            format!("outbox_{major}"),
            format!("usr/pgsql-{major}/lib"),
            format!("usr/pgsql-{major}/share/extension"),
        ),
    ] {
        let directory = unpack(kind);
        let files = listing(directory.path());
        let mut wanted = vec![
            format!("644 ./{lib}/outbox.so"),
            format!("644 ./{share}/outbox.control"),
            format!("644 ./usr/share/doc/{extension}/docs/operate/install.md"),
            "755 ./usr/bin/outboxctl".to_owned(),
            "644 ./usr/share/man/man1/outboxctl-serve.1.gz".to_owned(),
            "644 ./usr/share/bash-completion/completions/outboxctl".to_owned(),
            "644 ./usr/lib/systemd/system/outboxctl-serve@.service".to_owned(),
            "644 ./usr/lib/systemd/system/outboxctl-work@.service".to_owned(),
            "644 ./usr/lib/sysusers.d/outboxctl.conf".to_owned(),
        ];
        let scripts = fs::read_dir(root().join("sql")).expect("sql/").flatten();
        let scripts = scripts.map(|entry| entry.file_name().display().to_string());
        let scripts = scripts.filter(|name| name.ends_with(".sql"));
        wanted.extend(scripts.map(|name| format!("644 ./{share}/{name}")));
        for name in [extension.as_str(), "outboxctl"] {
            for file in [
                "README.md",
                "changelog.gz",
                "copyright",
                "sbom.cdx.json",
                "third-party-licences.gz",
            ] {
                wanted.push(format!("644 ./usr/share/doc/{name}/{file}"));
            }
        }
        for file in wanted {
            assert!(files.contains(&file), "{kind} has no {file}: {files:#?}");
        }
        let programs: Vec<&String> = files.iter().filter(|file| !file.starts_with("644 ")).collect();
        assert_eq!(programs, ["755 ./usr/bin/outboxctl"], "{kind}");
        directory.finish();
    }
}

#[test]
fn a_dry_run_of_the_release_makes_packages_an_archive_sboms_and_their_checksums() {
    packages("deb");
    let out = root().join("target/packages");
    output(
        Command::new("sha256sum")
            .current_dir(&out)
            .args(["--check", "--strict", "SHA256SUMS"]),
    );
    let sums = fs::read_to_string(out.join("SHA256SUMS")).expect("SHA256SUMS");
    let mut files = vec![
        format!("outbox-{}.zip", env!("CARGO_PKG_VERSION")),
        format!("outbox-{}.cdx.json", major()),
        "outboxctl.cdx.json".to_owned(),
    ];
    files.extend([names("deb"), names("rpm")].concat());
    for file in files {
        assert!(sums.contains(&format!("  {file}\n")), "no {file} in {sums}");
    }
}

#[test]
fn the_sbom_names_the_crates_that_are_linked_with_licence_and_checksum() {
    packages("deb");
    let sbom: Value =
        serde_json::from_str(&read(&format!("target/packages/outbox-{}.cdx.json", major()))).expect("JSON");
    assert_eq!(sbom["metadata"]["component"]["version"], env!("CARGO_PKG_VERSION"));
    let crates = sbom["components"].as_array().expect("components");
    let names: Vec<&str> = crates.iter().filter_map(|found| found["name"].as_str()).collect();
    for linked in ["lapin", "outbox-core", "pgrx", "rustls"] {
        assert!(names.contains(&linked), "no {linked} in {names:?}");
    }
    for other in ["amqprs", "clap", "proptest", "bindgen"] {
        assert!(!names.contains(&other), "{other} is not linked");
    }
    for found in crates {
        assert!(found["licenses"][0]["expression"].is_string(), "{found}");
        let ours = found["name"].as_str().is_some_and(|name| name.starts_with("outbox-"));
        assert!(ours || found["hashes"][0]["content"].is_string(), "{found}");
    }
}

/// A program of packaging/requirements.txt.
fn tool(name: &str) -> Command {
    packages("deb"); // installs them
    Command::new(root().join("target/packaging/bin").join(name))
}

#[test]
fn hadolint_accepts_the_dockerfile_and_zizmor_the_workflow() {
    output(tool("hadolint").arg(root().join("packaging/Dockerfile")));
    let workflows = root().join(".github/workflows");
    output(tool("zizmor").args(["--offline", "--strict-collection"]).arg(workflows));
}

/// The services of the compose file and its definitions of RabbitMQ, as Compose reads them.
fn compose() -> (Value, String) {
    let mut compose = tool("docker-compose");
    for variable in [
        "POSTGRES_PASSWORD",
        "MONITOR_PASSWORD",
        "RABBITMQ_PASSWORD",
        "MONITOR_TOKEN",
    ] {
        compose.env(variable, "a secret of the test");
    }
    compose
        .arg("--file")
        .arg(root().join("packaging/compose.yml"))
        .args(["config", "--format", "json"]);
    let config = output(&mut compose).replace("$$", "$"); // it prints a compose file
    let config: Value = serde_json::from_str(&config).expect("JSON");
    let definitions = config["configs"]["definitions"]["content"].as_str();
    (config["services"].clone(), definitions.expect("definitions").to_owned())
}

/// Without Docker: a broker with the definitions, a server after the script, and the programs with their options.
#[test]
fn the_services_of_the_compose_file_deliver_to_a_queue_and_to_outboxctl_listen() {
    const SHOP: &str = "shop";
    let (services, definitions) = compose();
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let environment = |service: &str| -> Vec<(String, String)> {
        let variables = services[service]["environment"].as_object().expect("variables");
        variables
            .iter()
            .map(|(name, value)| (name.clone(), text(value)))
            .collect()
    };
    let directory = ServerDir::create("compose");
    let broker = Broker::start();
    let file = directory.path().join("definitions.json");
    fs::write(&file, definitions).expect("write the definitions");
    broker.ctl(&["import_definitions", &file.display().to_string()]);

    let port = port::free_port();
    let mut listen = Command::new(program::outboxctl());
    let words = services["listen"]["command"].as_array().expect("words");
    listen
        .args(words.iter().skip(1).map(text))
        .args(["--port", &port.to_string()]);
    let mut listen = process::spawn_bound(piped(listen), libc::SIGKILL).expect("start outboxctl listen");
    let mut lines = BufReader::new(listen.stdout.take().expect("piped")).lines();
    let mut line = || lines.next().expect("a line").expect("text");
    assert!(line().contains(&format!("http://0.0.0.0:{port}/")));
    line(); // how to make a destination

    let cluster = Cluster::builder().start();
    cluster.exec("postgres", &format!("create database {SHOP}"));
    let variables = environment("postgres");
    let hook = variables
        .iter()
        .find(|(name, _)| name == "HOOK_HOST")
        .expect("HOOK_HOST");
    assert!(services[&hook.1].is_object(), "{} is a service", hook.1);
    let here = |(name, value): &(String, String)| {
        let value = value.replace("rabbitmq:5672", &format!("127.0.0.1:{}", broker.port()));
        let value = value.replace("listen:8081", &format!("127.0.0.1:{port}"));
        (
            name.clone(),
            if value == hook.1 { "127.0.0.1".to_owned() } else { value },
        )
    };
    let mut init = Command::new("sh");
    init.args(["-c", &read("packaging/compose-init.sh")])
        .envs(variables.iter().map(here))
        .env("POSTGRES_USER", "postgres")
        .env("PGDATA", cluster.data_dir())
        .env("PGHOST", "127.0.0.1")
        .env("PGPORT", cluster.port().to_string())
        .env("PATH", path_with(&cluster.installation().bin("")));
    process::run_as(&mut init, process::postgres_account());
    output(&mut init);
    cluster.restart();
    for destination in ["default", "hook"] {
        wait_until("each step of the check to pass", LONG, || {
            cluster.query_one(SHOP, &format!("select bool_and(ok) from outbox_check('{destination}')"))
        });
    }
    for statement in markdown::blocks(&read("docs/packages.md"), "sql") {
        cluster.exec(SHOP, &statement);
    }
    assert_eq!(line(), r#"#2 OrderPlaced order:42 {"order": 42}"#);
    wait_until("both messages to be published", LONG, || {
        cluster.query_one(
            SHOP,
            "select count(*) = 2 from outbox_messages where status = 'published'",
        )
    });
    let keys: Vec<_> = all_of(&broker, "orders")
        .iter()
        .map(|message| message.routing_key.clone())
        .collect();
    assert_eq!(keys, ["order.placed"]);

    let script = text(&services["monitor"]["command"][0])
        .replace("/tmp/token", &directory.path().join("token").display().to_string())
        .replace("0.0.0.0:8080", "127.0.0.1:0 --json");
    let mut monitor = Command::new("sh");
    monitor
        .args(["-ec", &script])
        .envs(environment("monitor"))
        .env("PGHOST", "127.0.0.1")
        .env("PGPORT", cluster.port().to_string())
        .env("PATH", path_with(program::outboxctl().parent().expect("its directory")));
    let mut monitor = process::spawn_bound(piped(monitor), libc::SIGKILL).expect("start the monitor");
    let mut first = String::new();
    let output = monitor.stdout.take().expect("piped");
    BufReader::new(output).read_line(&mut first).expect("its first line");
    let first: Value = serde_json::from_str(&first).expect("JSON");
    assert_eq!((&first["database"], &first["actions"]), (&SHOP.into(), &true.into()));
    process::kill(&mut monitor);
    process::kill(&mut listen);
    directory.finish();
}

fn piped(mut command: Command) -> Command {
    command.stdout(Stdio::piped());
    command
}

/// PATH with this directory first.
fn path_with(directory: &Path) -> OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::iter::once(directory.to_owned()).chain(std::env::split_paths(&path));
    std::env::join_paths(directories).expect("no directory of PATH contains a colon")
}

#[test]
fn lintian_finds_no_error_in_the_debian_packages() {
    let mut lintian = Command::new("lintian");
    lintian.args(["--allow-root", "--no-cfg", "--fail-on", "error"]);
    output(lintian.args(packages("deb")));
}

#[test]
fn no_program_needs_a_newer_glibc_than_its_package_and_the_docs_say() {
    let directory = unpack("deb");
    let library = format!("usr/lib/postgresql/{}/lib/outbox.so", major());
    let programs = [library.as_str(), "usr/bin/outboxctl"].map(|program| directory.path().join(program));
    let docs = read("docs/packages.md");
    for (program, (deb, rpm)) in programs.iter().zip(packages("deb").iter().zip(&packages("rpm"))) {
        let symbols = output(Command::new("readelf").args(["--version-info", "--wide"]).arg(program));
        let versions = symbols.split("Name: GLIBC_").skip(1);
        let numbers = |version: &str| -> Vec<u32> { version.split('.').flat_map(str::parse).collect() };
        let versions = versions.filter_map(|rest| rest.split_whitespace().next());
        let newest = versions.max_by_key(|version| numbers(version)).expect("a version");
        let depends = output(Command::new("dpkg-deb").arg("--field").arg(deb).arg("Depends"));
        assert!(depends.contains(&format!("libc6 (>= {newest})")), "{newest}: {depends}");
        let requires = output(
            Command::new("rpm")
                .args(["--query", "--requires", "--package"])
                .arg(rpm),
        );
        assert!(
            requires.contains(&format!("glibc >= {newest}\n")),
            "{newest}: {requires}"
        );
        // The docs speak of packages that are built on Debian 12.
        if glibc() == "2.36" {
            assert!(docs.contains(&format!("| glibc | {newest} or later")), "{newest}");
        }
    }
    directory.finish();
}

/// The version of the glibc of this machine.
fn glibc() -> String {
    output(Command::new("getconf").arg("GNU_LIBC_VERSION"))
        .trim()
        .replace("glibc ", "")
}

/// Debian's suite with this major, and the mirror of this machine; or why the packages cannot be installed here.
fn debian() -> Result<(&'static str, String), String> {
    if !we_are_root() {
        return Err("debootstrap needs root".to_owned());
    }
    if !Path::new("/usr/sbin/debootstrap").exists() {
        return Err("this machine has no debootstrap".to_owned());
    }
    let suite = match major().as_str() {
        "15" => "bookworm",
        "17" => "trixie",
        "18" => "forky",
        major => return Err(format!("no Debian has Postgres {major}")),
    };
    let mut isolated = Command::new("unshare");
    isolated.args(["--mount", "--pid", "--fork", "mount", "--make-rprivate", "/"]);
    if !isolated.status().is_ok_and(|status| status.success()) {
        return Err("this machine allows no mounts".to_owned());
    }
    let targets = Command::new("apt-get")
        .args([
            "indextargets",
            "--format",
            "$(LABEL) $(REPO_URI)",
            "Created-By: Packages",
        ])
        .output()
        .map_err(|error| format!("apt-get: {error}"))?;
    let targets = String::from_utf8_lossy(&targets.stdout).into_owned();
    let mirror = targets.lines().find_map(|line| line.strip_prefix("Debian "));
    let mirror = mirror.ok_or("apt of this machine has no mirror of Debian")?;
    Ok((suite, mirror.to_owned()))
}

#[test]
fn apt_installs_the_packages_in_a_clean_debian_whose_server_delivers_and_removes_them() {
    let (suite, mirror) = match debian() {
        Ok(found) => found,
        Err(reason) => return support::skip("apt installs the packages in a clean Debian", &reason),
    };
    let [package, _] = packages("deb");
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let directory = ServerDir::create("debian");
    let mut install = Command::new("unshare");
    install.args(["--mount", "--pid", "--fork", "--kill-child"]);
    install.arg(root().join("tests/packages/clean_debian.sh"));
    install.arg(directory.path().join("root")).args([suite, &mirror]);
    install
        .arg(package.parent().expect("a directory"))
        .arg(major())
        .arg(port::free_port().to_string());
    install.env(
        "RABBITMQ_URL",
        format!("amqp://{}@127.0.0.1:{}", broker.user(), broker.port()),
    );
    install
        .env("RABBITMQ_PASSWORD", broker.password())
        .env("EXCHANGE", exchange);
    let printed = output(&mut install);
    let all: Vec<_> = all_of(broker, &queue)
        .iter()
        .map(|message| message.json()["type"].clone())
        .collect();
    let (arrived, volume) = match major().parse::<u32>().expect("a number") {
        18.. => (
            vec!["Installed", "Mounted"],
            "--- the server delivers with the image volume of CloudNativePG\npublished\n",
        ),
        _ => (vec!["Installed"], ""),
    };
    assert_eq!(all, arrived, "{printed}");
    assert_eq!(printed.matches("Status: install ok installed").count(), 2, "{printed}");
    assert!(printed.contains("\npublished\nMessage 1 to default\n"), "{printed}");
    let end = printed
        .split("apt removes the packages\n")
        .nth(1)
        .expect("the last steps");
    assert_eq!(
        end,
        format!("the server works without them\n{volume}"),
        "no file of the packages is left"
    );
    directory.finish();
}
