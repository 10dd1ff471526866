//! The name of a destination that somebody else takes: another owner's server gets nothing until an administrator
//! adopts it, and a server that stays with its owner, or is given away, goes on delivering. On a real Postgres.

use postgres::NoTls;
use postgres::error::SqlState;
use std::sync::{Arc, Mutex};
use support::courier::{Outside, without_workers};
use support::{
    Broker, Cluster, DB, LONG, Receiver, Remedy, Reply, Session, exchange_and_queue, refused, type_sql,
    unconnected_cluster, wait_true, wait_until,
};

/// A server with roles that may create destinations, and what each of them receives.
struct Site {
    cluster: Cluster,
    receivers: Vec<(&'static str, Receiver)>,
}

fn command(remedy: &Remedy) -> &str {
    remedy.command()
}

const ROLES: [&str; 4] = ["alice", "bob", "carol", "mallory"];

impl Site {
    fn new() -> Self {
        Self::on(unconnected_cluster("", "nowhere", &["outbox.http_allow = '127.0.0.1'"]))
    }

    /// The destination orders is a server of alice, and gets all events for the default destination.
    fn on(cluster: Cluster) -> Self {
        let receivers: Vec<_> = ROLES
            .into_iter()
            .chain(["postgres"])
            .map(|role| (role, Receiver::start(|_| Reply::status(200))))
            .collect();
        for role in ROLES {
            cluster.exec(
                DB,
                &format!("create role {role}; grant usage on foreign data wrapper outbox_http to {role}"),
            );
        }
        let site = Self { cluster, receivers };
        site.create("alice", "orders");
        site.run("select outbox_subscribe('orders')");
        site
    }

    fn run(&self, sql: &str) {
        self.cluster.exec(DB, sql);
    }

    fn receiver(&self, role: &str) -> &Receiver {
        let found = self.receivers.iter().find(|(name, _)| *name == role);
        &found.expect("a receiver").1
    }

    /// The statement with which a role creates a server that posts to the role's receiver.
    fn creation(&self, role: &str, name: &str) -> String {
        let url = self.receiver(role).url("/");
        format!("create server {name} foreign data wrapper outbox_http options (url '{url}')")
    }

    fn create(&self, role: &str, name: &str) {
        self.run(&format!("set role {role}; {}", self.creation(role, name)));
    }

    fn publish(&self) {
        self.run("select outbox_publish('T', '{}')");
    }

    /// Lets a worker in the server see the servers as they are now.
    fn refresh(&self) {
        self.run("select from outbox_run_pass() where current_setting('outbox.workers') <> '0'");
    }

    /// The destination delivers a new event to the receiver of this role.
    fn goes_on(&self, receiver: &str, after: &str) {
        self.refresh();
        let receiver = self.receiver(receiver);
        let before = receiver.requests().len();
        self.publish();
        wait_until(&format!("a message after: {after}"), LONG, || {
            receiver.requests().len() > before
        });
        let problems = "select count(*) from outbox_health where problem like '%and the one before%'";
        assert_eq!(self.cluster.query_one::<i64>(DB, problems), 0, "{after}");
    }

    /// No worker delivers to the destination, and health names the command that ends this.
    fn waits(&self, after: &str) -> Remedy {
        self.refresh();
        let state =
            "select exists (select from outbox_connections where destination = 'orders' and state = 'not adopted')";
        wait_true(&self.cluster, &format!("a worker to notice: {after}"), state);
        self.publish();
        self.refresh();
        Remedy::wait(
            &self.cluster,
            "destination = 'orders' and problem like 'its server belongs to %'",
        )
    }

    fn got(&self, role: &str) -> usize {
        self.receiver(role).requests().len()
    }
}

#[test]
fn a_server_that_another_role_creates_gets_nothing_until_it_is_adopted_and_then_all_that_waits() {
    let site = Site::new();
    let cluster = &site.cluster;
    site.goes_on("alice", "its creation");
    site.run("select outbox_pause('orders')");
    site.publish();
    site.run("drop server orders cascade");
    let mut mallory = cluster.connect(DB);
    mallory.run("set role mallory");
    mallory.run(&site.creation("mallory", "orders"));
    site.run("select outbox_resume('orders')");
    // What is subscribed, named, sent again and retried.
    let remedy = site.waits("a stranger");
    site.run("grant usage on foreign server orders to alice; grant outbox_writer to alice");
    site.run("set role alice; select outbox_publish('T', '{}', destination => 'orders')");
    let replayed = "select outbox_replay(source_destination => 'orders', dry_run => false)";
    assert_eq!(cluster.query_one::<i64>(DB, replayed), 1);
    site.run(
        "insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, reason)
           select seq, now(), 1, partition, destination, 'failed' from outbox where destination = 'orders' order by seq limit 1;
         delete from outbox o using outbox_dead d where o.seq = d.seq and o.destination = d.destination;
         select outbox_retry(seq, destination) from outbox_dead",
    );
    // Another destination shows that the worker goes on.
    site.create("bob", "other");
    site.run("select outbox_publish('T', '{}', destination => 'other')");
    site.refresh();
    wait_until("the other destination", LONG, || site.got("bob") == 1);
    let state = "select format('%s: %s', state, detail) from outbox_destination_status where destination = 'orders'";
    assert_eq!(
        cluster.query_one::<String>(DB, state),
        "not adopted: its server belongs to mallory, and the one before it belonged to alice"
    );
    let why =
        "select remedy from outbox_why((select min(seq) from outbox where destination = 'orders'), 'orders') limit 1";
    assert_eq!(cluster.query_one::<String>(DB, why), remedy.to_string());
    let check = "select detail from outbox_check('orders') where step = 'delivery' and not ok";
    assert!(
        cluster
            .query_one::<String>(DB, check)
            .contains("outbox_adopt(destination => 'orders')")
    );
    assert_eq!((site.got("alice"), site.got("mallory")), (1, 0));

    // Not for a relay either, nor at the word of mallory.
    site.run("select outbox_pause('orders')");
    let relay = refused(cluster, "select outbox_fetch_unpublished(destination => 'orders')");
    assert_eq!(relay.code(), &SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE);
    assert!(relay.hint().is_some_and(|hint| remedy.starts_with(hint)), "{relay:?}");
    site.run("select outbox_resume('orders')");
    let error = mallory.batch_execute(command(&remedy)).expect_err("no administrator");
    assert_eq!(error.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE));

    type_sql(cluster, command(&remedy));
    wait_until("all that has waited", LONG, || site.got("mallory") == 4);
    site.goes_on("mallory", "the adoption");
    let again = "select outbox_adopt(destination => 'orders')";
    assert!(!cluster.query_one::<bool>(DB, again), "it is adopted already");
    let audit = "select format('%s %s', action, filter ->> 'destination') from outbox_audit where action = 'adopt'";
    assert_eq!(cluster.query_one::<String>(DB, audit), "adopt orders");
    // From now on the name is of mallory.
    site.run("drop server orders");
    site.create("alice", "orders");
    site.waits("the first owner after an adoption");
    assert_eq!(site.got("alice"), 1);
}

#[test]
fn a_server_goes_on_delivering_with_a_new_owner_and_after_its_owner_created_it_again() {
    let site = Site::new();
    let cluster = &site.cluster;
    let again = |role: &str, sql: &str, after: &str| {
        site.run(sql);
        site.create(role, "orders");
        site.goes_on(role, after);
    };
    again("alice", "drop server orders", "created again by its owner");
    site.run("alter server orders owner to bob");
    site.goes_on("alice", "ALTER SERVER OWNER TO"); // its URL is the same
    again(
        "bob",
        "set role bob; drop server orders cascade",
        "created again by the new owner",
    );
    site.run("reassign owned by bob to carol");
    site.goes_on("bob", "REASSIGN OWNED");
    again(
        "carol",
        "drop owned by carol; grant usage on foreign data wrapper outbox_http to carol",
        "DROP OWNED",
    );
    site.run("alter role carol rename to caroline; drop server orders");
    site.run(&format!("set role caroline; {}", site.creation("carol", "orders")));
    site.goes_on("carol", "created again by an owner with a new name");
    // A superuser who creates it for its owner, and one who keeps it.
    site.run("drop server orders");
    site.run(&format!(
        "begin; {}; alter server orders owner to caroline; commit",
        site.creation("bob", "orders")
    ));
    site.goes_on("bob", "created again for its owner");
    site.run("alter server orders rename to archive; alter server archive rename to orders");
    site.goes_on("bob", "renamed and renamed back");

    let sent: Vec<usize> = ROLES.map(|role| site.got(role)).into();
    for (role, sql, after) in [
        ("alice", "drop server orders", "an earlier owner"),
        (
            "mallory",
            "drop owned by alice; grant usage on foreign data wrapper outbox_http to alice",
            "DROP OWNED",
        ),
        ("bob", "drop server orders cascade", "DROP SERVER CASCADE"),
        (
            "mallory",
            "alter server orders rename to archive",
            "the name of a renamed server",
        ),
    ] {
        site.run(sql);
        site.create(role, "orders");
        site.waits(after);
    }
    // A server that takes the name by a rename; a role that takes the name of the owner.
    site.run("drop server orders; create role carol; grant usage on foreign data wrapper outbox_http to carol");
    site.create("mallory", "innocent");
    site.run("alter server innocent owner to mallory; alter server innocent rename to orders");
    site.waits("a server renamed to the name");
    site.run("drop server orders");
    site.create("carol", "orders");
    site.waits("a role with the owner's former name");
    assert_eq!(ROLES.map(|role| site.got(role)).to_vec(), sent);
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox where destination = 'orders'"),
        6
    );
    // What waits goes to the owner of the name.
    site.run("drop server orders");
    site.run(&format!("set role caroline; {}", site.creation("alice", "orders")));
    wait_until("all that has waited", LONG, || site.got("alice") == sent[0] + 6);
}

/// The receiver of its dead letters would learn of events that the server may not have.
#[test]
fn a_server_that_is_not_adopted_has_no_notices_of_dead_letters_sent() {
    let site = Site::new();
    site.create("mallory", "ears");
    site.run("select outbox_pause('orders')");
    site.run("select outbox_publish('T', '{}', expires_at => clock_timestamp() + interval '4 seconds')");
    site.run("drop server orders");
    site.create("mallory", "orders");
    site.run("alter server orders options (add dead_letters_to 'ears'); select outbox_resume('orders')");
    let dead = "select exists (select from outbox_dead where destination = 'orders' and reason like 'expired%')";
    wait_true(&site.cluster, "the message to expire", dead);
    let notices = "select count(*) from outbox_events where type = 'outbox.dead_letter'";
    assert_eq!(site.cluster.query_one::<i64>(DB, notices), 0);
    assert_eq!(site.got("mallory"), 0);
}

#[test]
fn a_worker_outside_sends_nothing_to_a_server_that_is_not_adopted() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let site = Site::on(without_workers(broker, &exchange, &["outbox.http_allow = '127.0.0.1'"]));
    let _outside = Outside::start(&site.cluster, "postman");
    site.goes_on("alice", "its creation");
    site.run("drop server orders");
    site.create("mallory", "orders");
    let remedy = site.waits("a stranger");
    assert_eq!(site.got("mallory"), 0);
    type_sql(&site.cluster, command(&remedy));
    wait_until("what has waited", LONG, || site.got("mallory") == 1);
}

#[test]
fn a_role_that_creates_a_server_under_the_name_of_another_is_warned() {
    let site = Site::new();
    site.run("drop server orders");
    let heard = Arc::new(Mutex::new(Vec::new()));
    let notices = Arc::clone(&heard);
    let mut config: postgres::Config = site.cluster.conn_string(DB).parse().expect("a connection string");
    config.notice_callback(move |notice| notices.lock().expect("no panic").push(notice));
    let mut client = config.connect(NoTls).expect("connect");
    client.run("set role mallory");
    client.run(&site.creation("mallory", "orders"));
    client.run(&site.creation("mallory", "own"));
    let said = |notice: &postgres::error::DbError| {
        let [detail, hint] = [notice.detail(), notice.hint()].map(Option::unwrap_or_default);
        format!("{} {detail} {hint}", notice.message())
    };
    let heard: Vec<String> = heard.lock().expect("no panic").iter().map(said).collect();
    let about_owners: Vec<_> = heard.iter().filter(|text| text.contains("adopts it")).collect();
    assert_eq!(
        about_owners,
        [
            "destination \"orders\" gets no messages until an administrator adopts it The server of that name belonged to \
          alice; this one belongs to mallory. select outbox_adopt(destination => 'orders')"
        ]
    );
}
