# Everything a person does with this tree. `make` builds, `make install` installs, `make help` names the rest.
#
# - PG_CONFIG: the pg_config of the server to build for (as with any PGXS extension)
# - PG: a major instead; PG=17 is the server of the machine, or of `make majors`
# - RABBITMQ: a version of RabbitMQ for the tests, of `make majors`, such as 4.0
# - DESTDIR: root to install under
# - PREFIX: where `make install-ctl` puts outboxctl below it, /usr/local by default
# - PROFILE: release (default) or dev
# - ROWS, FLAGS: rows and flags of `make bench`; FLAGS=--help names them. FLAGS=--dry-run is for `make release`

MAJORS      = target/majors
PG_OF_MAJOR = $(firstword $(wildcard /usr/lib/postgresql/$(PG)/bin/pg_config $(MAJORS)/$(PG)/pg_config))
# Not $(wildcard): make remembers what it found, and `servers:` may install a server.
PG_USUAL    = $(or $(shell command -v pg_config || ls /usr/lib/postgresql/1[5-9]/bin/pg_config 2>/dev/null | tail -n 1),pg_config)
PG_CONFIG ?= $(if $(PG),$(or $(PG_OF_MAJOR),$(error there is no Postgres $(PG): install it, or run `make majors`)),$(PG_USUAL))
PROFILE   ?= release
CARGO     ?= cargo

# The real one behind Debian's wrapper: another path to the same would rebuild the bindings.
PG_CONFIG_PATH = $(or $(wildcard $(shell $(PG_CONFIG) --bindir 2>/dev/null)/pg_config),$(PG_CONFIG))
PG_MAJOR   = $(shell $(PG_CONFIG) --version 2>/dev/null | sed -E 's/^PostgreSQL ([0-9]+).*/\1/')
VERSION   := $(shell sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
SQL       := sql/outbox--$(VERSION).sql
# One target directory per major: the bindings are generated from its headers.
PG_TARGET  = target/pg$(PG_MAJOR)
LIBRARY    = $(PG_TARGET)/$(if $(filter release,$(PROFILE)),release,debug)/liboutbox.so
SHAREDIR   = $(DESTDIR)$(shell $(PG_CONFIG) --sharedir)/extension
LIBDIR     = $(DESTDIR)$(shell $(PG_CONFIG) --pkglibdir)

# outboxctl runs on any machine, with a server of Postgres or without: where other programs go, not into the server's directories.
PREFIX      ?= /usr/local
bindir      ?= $(PREFIX)/bin
datarootdir ?= $(PREFIX)/share
mandir      ?= $(datarootdir)/man
CTL          = target/release/outboxctl

# A release has packages for each server of this machine, and for those that are unpacked below target/majors but the
# release candidate.
RELEASE     ?= $(filter-out $(MAJORS)/19/pg_config,$(wildcard /usr/lib/postgresql/*/bin/pg_config $(MAJORS)/*/pg_config))

# What the library is made of. `make install` copies a library that is newer than these, and builds otherwise.
SOURCES      = Cargo.toml Cargo.lock src crates/core/src crates/worker/src crates/transport/src
CTL_SOURCES  = Cargo.toml Cargo.lock crates/core/src crates/worker/src crates/transport/src crates/outboxctl/src

.PHONY: all build-ctl help demo check test test-systems test-kind test-all test-major test-minors test-pg-upgrade majors chaos bench build install install-ctl installcheck deb rpm release sql lint deny fmt clean
.PHONY: tools ctl-tools servers test-tools systems-tools package-tools private private-minor

all: build build-ctl

help: ## this text
	@echo "outbox $(VERSION): a transactional outbox for Postgres with its relay inside the server"
	@echo
	@sed -nE 's/^([a-z -]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo
	@echo "  for another server: make PG_CONFIG=/path/to/pg_config install"

demo: private ## commit one event, roll back another, see what RabbitMQ and a receiver by HTTP get, and retry a dead letter
	@$(CARGO) build --locked $(CRATES) --bin demo --bin outboxctl
	@$(RUN) target/debug/demo

test: test-tools private ## every test but those of test-systems, on private servers under target/; FLAGS=--times lists the slowest
	$(BUILD_TESTS)
	$(RUN) $(RUN_TESTS) suite $(if $(ONLY),-- $(ONLY),$(PURE_TESTS))

check: test-tools private ## within two minutes: types, units, models, and a test on real servers for each promise of docs/guarantees.md
	$(BUILD_TESTS)
	$(RUN) $(RUN_TESTS) suite core worker outboxctl -- $(PROMISES)

# A test for each promise, I1 to I10.
PROMISES    = ten_thousand_events_of_many_writers_arrive_once_and_in_order_per_key \
  a_commit_delivers_and_a_rollback_does_not a_dead_letter_blocks_its_key_and_no_other_until_it_is_discarded \
  a_fast_stop_under_load_loses_and_duplicates_nothing a_worker_that_hangs_past_its_lease_changes_nothing_afterwards \
  server::an_open_or_prepared_transaction_holds_its_keys_and_no_other a_consumer_reads_the_event_byte_for_byte_and_all_its_properties \
  a_message_that_crashes_workers_becomes_the_only_dead_letter a_fast_stop_keeps_its_time_limit_with_the_broker_suspended \
  a_url_with_a_password_is_refused_and_never_repeated

test-systems: systems-tools private ## tests with a clean Debian, clients of other languages, a browser and Prometheus
	$(BUILD_TESTS)
	$(RUN) $(RUN_TESTS) systems $(if $(ONLY),-- $(ONLY))

test-kind: FEATURES = toy
test-kind: test-tools private ## a kind of destination for tests, on a server of its own: one folder and one line
	$(BUILD_TESTS)
	$(RUN) $(RUN_TESTS) kind

# One selection of packages for all builds: another one would select other features, and compile the dependencies again.
CRATES      = --workspace --exclude outbox
BUILD_TESTS = $(CARGO) build --locked $(CRATES) --bins --tests --message-format=json-render-diagnostics > target/tests.json
RUN_TESTS   = target/debug/run-tests $(FLAGS) target/tests.json
PURE_TESTS  = core worker transport outboxctl bench support

test-all: test ## `make test`, then on all of `make majors`, test-minors, test-pg-upgrade
	for major in $(sort $(notdir $(patsubst %/complete,%,$(wildcard $(MAJORS)/*/complete)))); do $(MAKE) test PG=$$major || exit 1; done
	if [ -e $(MAJORS)/18/complete ]; then $(MAKE) test-minors && $(MAKE) test-pg-upgrade; fi
	for broker in $(patsubst rabbitmq-%,%,$(notdir $(wildcard $(MAJORS)/rabbitmq-*))); do $(MAKE) test RABBITMQ=$$broker || exit 1; done

test-major: private ## with PG=17: the tests that depend most on the server
	$(BUILD_TESTS)
	$(RUN) $(TEST_MAJOR)

test-minors: private-minor ## build for one minor of Postgres 15 and run on another, both ways; the other is of `make majors`
	$(MAKE) build PG_CONFIG=$(MINOR) PG_TARGET=target/minor15
	$(BUILD_TESTS)
	OUTBOX_PG_BINDIR=$$(tail -n 1 target/minor.root)$$($(MINOR) --bindir) $(TEST_MAJOR)
	$(MAKE) install PG=15 DESTDIR=$$(tail -n 1 target/private.root) LIBRARY=target/minor15/release/liboutbox.so
	OUTBOX_PG_BINDIR=$$(tail -n 1 target/private.root)$$($(USUAL) --bindir) $(TEST_MAJOR)
	$(MAKE) private PG=15

# A server with attribute versions (the minors of November 2026) can only be upgraded to another one that has them.
test-pg-upgrade: private-minor ## pg_upgrade with messages, from Postgres 15 to 17 and from an earlier minor of 15 to 18, of `make majors`
	$(BUILD_TESTS)
	old=$$(tail -n 1 target/private.root)$$($(USUAL) --bindir) && $(MAKE) private PG=17 && \
	  OUTBOX_PG_UPGRADE=$$old:$$(tail -n 1 target/private.root)$$($(MAJORS)/17/pg_config --bindir) $(TEST_PG_UPGRADE)
	$(MAKE) private PG=18
	OUTBOX_PG_UPGRADE=$$(tail -n 1 target/minor.root)$$($(MINOR) --bindir):$$(tail -n 1 target/private.root)$$($(MAJORS)/18/pg_config --bindir) \
	  $(TEST_PG_UPGRADE)

# Private copies of this machine's Postgres 15 and of its earlier minor, with one library.
private-minor:
	$(MAKE) private PG=15
	tests/support/mirror_pg.sh $(realpath $(MINOR)) target/private/minor15 > target/minor.root
	$(MAKE) install PG_CONFIG=$(MINOR) DESTDIR=$$(tail -n 1 target/minor.root) LIBRARY=target/pg15/release/liboutbox.so

TEST_PG_UPGRADE = $(RUN_TESTS) suite -- --ignored upgrade::
TEST_MAJOR = $(RUN_TESTS) suite -- regress:: direct:: delivery:: faults::
USUAL      = /usr/lib/postgresql/15/bin/pg_config
MINOR      = $(MAJORS)/minors/15/pg_config

majors: ## unpack Postgres 16, 17, 18, 19 (rc1) and RabbitMQ 4 below target/, for `make test PG=17`, `make test RABBITMQ=4.0`, `make test-all`
	@tests/support/install_tools.sh majors
	@tests/support/majors.sh $(MAJORS)

chaos: test-tools private ## about an hour: kills, failovers and dice, OUTBOX_CHAOS (20) times as often as in `make test`; prints its OUTBOX_SEED
	$(BUILD_TESTS)
	@export OUTBOX_CHAOS=$${OUTBOX_CHAOS:-20} OUTBOX_SEED=$${OUTBOX_SEED:-$$(date +%s)} && \
	  echo "OUTBOX_CHAOS=$$OUTBOX_CHAOS OUTBOX_SEED=$$OUTBOX_SEED" && \
	  PROPTEST_CASES=$$((256 * OUTBOX_CHAOS)) $(RUN) $(RUN_TESTS) suite $(PURE_CHANCE) -- $(CHANCE)

# The tests that call support::chaos::rounds or seeds, and the property tests.
PURE_CHANCE = simulation http_order conformance outbox_core outbox_transport
CHANCE      = differential:: capture::random:: crash::kills crash::random crash::when_a_worker_ends launcher::signals \
  standbys::a_promoted_standby_has_every scaling::shards::the_order_of_each_key scaling::failover::a_failover_a_rewind \
  partition_order::partitions_of_brokers faults::connections_that_break faults::rows_that_move faults::deleted:: \
  operating::stop::a_fast_stop_under_load operating::stop::no_commit_of_a_worker source::many_events source::crashes::

bench: private ## measure speed beside what it is compared with; ROWS=drain,latency picks rows, FLAGS="--pairs 2" sizes
	$(CARGO) build --locked --release -p outbox-bench
	$(CARGO) build --locked --release -p outboxctl
	@$(RUN) target/release/outbox-bench $(if $(ROWS),--rows $(ROWS)) $(FLAGS)

# pgrx 0.19 declares Rust 1.96, and compiles with 1.95. cargo still refuses an older one.
EXTENSION = -p outbox --locked $(if $(filter 1.95.%,$(shell $(CARGO) --version)),--ignore-rust-version) --profile $(PROFILE) \
  --no-default-features --features "pg$(PG_MAJOR) $(FEATURES)"

build: tools ## build the extension; `make` alone builds outboxctl too
	PGRX_PG_CONFIG_PATH=$(PG_CONFIG_PATH) CARGO_TARGET_DIR=$(PG_TARGET) \
	  $(CARGO) build $(EXTENSION)
	@touch $(LIBRARY)

build-ctl: ctl-tools
	$(CARGO) build --locked --release -p outboxctl
	@touch $(CTL)

# $(call up_to_date,FILE,SOURCES,TARGET): builds unless the file is newer than all sources, so that root needs no cargo after `make`.
up_to_date = if [ ! -e $(1) ] || [ -n "$$(find $(2) -newer $(1) -type f | head -n 1)" ]; then \
	  command -v $(CARGO) >/dev/null 2>&1 || { \
	    echo "outbox: $(1) is missing or older than its sources, and there is no $(CARGO) to build it: run \`make\` first" >&2; exit 1; }; \
	  $(MAKE) --no-print-directory $(3); \
	fi

install: $(SQL) ## install into the server of PG_CONFIG; builds first only where `make` has not
	@$(call up_to_date,$(LIBRARY),$(SOURCES),build)
	install -d $(SHAREDIR) $(LIBDIR)
	install -m 644 $(LIBRARY) $(LIBDIR)/outbox.so
	sed 's/@CARGO_VERSION@/$(VERSION)/' outbox.control > $(SHAREDIR)/outbox.control
	chmod 644 $(SHAREDIR)/outbox.control
	install -m 644 sql/outbox--*.sql $(SHAREDIR)/

install-ctl: ## install outboxctl, with man pages and completions, below PREFIX; builds first only where `make` has not
	@$(call up_to_date,$(CTL),$(CTL_SOURCES),build-ctl)
	install -d $(DESTDIR)$(bindir) $(DESTDIR)$(mandir)/man1 $(DESTDIR)$(datarootdir)/bash-completion/completions \
	  $(DESTDIR)$(datarootdir)/zsh/site-functions $(DESTDIR)$(datarootdir)/fish/vendor_completions.d
	install -m 755 $(CTL) $(DESTDIR)$(bindir)/outboxctl
	$(CTL) man --to $(DESTDIR)$(mandir)/man1
	$(CTL) completions bash > $(DESTDIR)$(datarootdir)/bash-completion/completions/outboxctl
	$(CTL) completions zsh > $(DESTDIR)$(datarootdir)/zsh/site-functions/_outboxctl
	$(CTL) completions fish > $(DESTDIR)$(datarootdir)/fish/vendor_completions.d/outboxctl.fish

installcheck: ## run pg_test with pg_regress on the running server of PGHOST and PGPORT, as for any PGXS extension
	@tests/support/installcheck.sh $(PG_CONFIG_PATH) $(VERSION)

deb rpm: package-tools ## packages of the extension and of outboxctl, in target/packages
	@packaging/build.sh $@ $(PG_CONFIG_PATH)

release: package-tools ## packages for all servers here, checksums, SBOMs, and the tag; FLAGS=--dry-run tags nothing
	@packaging/release.sh $(FLAGS) $(RELEASE)

sql: ## make the install script of sql/src, and the update script if sql/update has one to this version
	@tests/support/build_sql.sh $(VERSION)

lint: tools ## formatting and clippy, warnings denied
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --all-targets $(CRATES) -- -D warnings
	PGRX_PG_CONFIG_PATH=$(PG_CONFIG_PATH) CARGO_TARGET_DIR=$(PG_TARGET) \
	  $(CARGO) clippy $(EXTENSION) -- -D warnings

deny: ctl-tools ## licences, advisories and sources of the dependencies, with cargo-deny; FLAGS="licenses bans sources" needs no network
	@command -v cargo-deny >/dev/null 2>&1 || { \
	  echo "outbox: installing cargo-deny with cargo, which takes some minutes" && $(CARGO) install --locked --quiet cargo-deny; }
	$(CARGO) deny --locked check $(FLAGS)

fmt: ## format all code
	$(CARGO) fmt --all

clean: ## remove what was built and what private servers left
	rm -rf target

# ---- what the targets above stand on ---------------------------------------------------------------------------------

tools: # compiler and server headers; says what it does before it does it
	@PG_CONFIG=$(PG_CONFIG) tests/support/install_tools.sh build

ctl-tools: # the compiler alone: outboxctl needs no server
	@tests/support/install_tools.sh ctl

# A target of its own: make expands a whole recipe before it runs its first line, and PG_MAJOR needs the server's pg_config.
servers: # compiler, headers, and the servers that demo and tests run; says what it does before it does it
	@PG_CONFIG=$(PG_CONFIG) tests/support/install_tools.sh servers

test-tools: # the same, and the programs beside which the tests run
	@PG_CONFIG=$(PG_CONFIG) tests/support/install_tools.sh tests

systems-tools: # the same for test-systems
	@PG_CONFIG=$(PG_CONFIG) tests/support/install_tools.sh systems

package-tools: # what builds packages
	@PG_CONFIG=$(PG_CONFIG) tests/support/install_tools.sh packages

private: servers # a copy of the installed server under target/ with this extension in it; the installation itself is left alone
	@mkdir -p target
	@tests/support/mirror_pg.sh $(PG_CONFIG_PATH) target/private/pg$(PG_MAJOR)$(FEATURES) > $(PRIVATE_ROOT) || { cat $(PRIVATE_ROOT); exit 1; }
	@$(MAKE) --no-print-directory build PG_CONFIG=$(PG_CONFIG_PATH) PROFILE=$(PROFILE) FEATURES=$(FEATURES)
	@rm -f $$(tail -n 1 $(PRIVATE_ROOT))$$($(PG_CONFIG) --sharedir)/extension/outbox--*.sql
	@$(MAKE) --no-print-directory install DESTDIR=$$(tail -n 1 $(PRIVATE_ROOT)) PG_CONFIG=$(PG_CONFIG_PATH) PROFILE=$(PROFILE)

# Where the path of the private server is.
PRIVATE_ROOT = target/private$(FEATURES).root

RUN = OUTBOX_PG_ROOT=$$(tail -n 1 $(PRIVATE_ROOT)) \
      OUTBOX_PG_BINDIR=$$(tail -n 1 $(PRIVATE_ROOT))$$($(PG_CONFIG) --bindir) \
      $(if $(RABBITMQ),OUTBOX_RABBITMQ_BINDIR=$(or $(realpath $(MAJORS)/rabbitmq-$(RABBITMQ)),$(error there is no RabbitMQ $(RABBITMQ): run `make majors`)))
