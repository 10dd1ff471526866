//! Runs every interleaving of a claim, a settle, a takeover, commits of producers and manual operations, on a real
//! server with one session for each actor. A step that waits for a lock continues when the lock is free, and the later
//! steps of its session after it. The rules for what a worker would send are those in the header of
//! crates/core/src/engine/claim.rs.

mod judge;

use std::collections::{HashSet, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use judge::{Event, Moment, Run, What, judge};
use postgres::Client;
use support::Cluster;
use support::{DB, LONG, NOTHING_RUNS, Session};

use Op::{Claim, Discard, Forge, Hold, Publish, Retry, Settle, Take};
use Step::{Commit, Open, Rollback, Whole};

// ---- the interleavings ----------------------------------------------------------------------------------------------

const WORKS: &[Step] = &[Open(Claim), Commit, Open(Settle), Commit];

#[test]
fn a_worker_and_its_successor_settle_each_message_once() {
    let takes_over = [Open(Take), Commit, Open(Claim), Commit, Open(Settle), Commit];
    let seen = play_all(&["k", "k", "l"], &[("A", WORKS), ("B", &takes_over)], 210);
    assert!(
        seen.missed > 0 && seen.fenced > 0 && seen.waits > 0 && seen.repeats > 0,
        "{seen:?}"
    );
}

#[test]
fn messages_committed_during_a_takeover_are_sent_once_and_in_order() {
    let takes_over = [Whole(Take), Open(Claim), Commit];
    let produces = [Open(Publish("k")), Commit];
    let seen = play_all(&["k", "l"], &[("A", WORKS), ("B", &takes_over), ("P", &produces)], 1260);
    assert!(seen.missed > 0 && seen.fenced > 0 && seen.waits > 0, "{seen:?}");
}

#[test]
fn messages_of_overlapping_producers_stay_in_order_through_a_takeover() {
    let works = [Whole(Claim), Whole(Settle)];
    let takes_over = [Whole(Take), Whole(Claim)];
    let (slow, quick) = ([Open(Publish("k")), Commit], [Whole(Publish("k"))]);
    let actors: &[Actor] = &[("A", &works), ("B", &takes_over), ("P1", &slow), ("P2", &quick)];
    let seen = play_all(&["k"], actors, 630);
    assert!(seen.fenced > 0 && seen.repeats > 0, "{seen:?}");
}

#[test]
fn a_discarded_message_is_not_sent_and_no_other_is_touched() {
    let works = [Open(Claim), Commit, Whole(Settle)];
    let takes_over = [Whole(Take), Open(Claim), Commit];
    let seen = play_all(
        &["k", "k"],
        &[("A", &works), ("B", &takes_over), ("O", &[Open(Discard), Commit])],
        560,
    );
    assert!(seen.missed > 0 && seen.fenced > 0 && seen.waits > 0, "{seen:?}");
}

#[test]
fn a_row_locked_by_a_session_only_delays() {
    let works = [Whole(Claim), Open(Settle), Commit];
    let takes_over = [Whole(Take), Open(Claim), Commit];
    let seen = play_all(
        &["k", "k"],
        &[("A", &works), ("B", &takes_over), ("O", &[Open(Hold), Rollback])],
        560,
    );
    assert!(seen.missed > 0 && seen.fenced > 0 && seen.waits > 0, "{seen:?}");
}

#[test]
fn a_retried_message_is_sent_once() {
    let works = [Open(Claim), Commit, Whole(Settle)];
    let takes_over = [Whole(Take), Whole(Claim)];
    let seen = play_all(
        &["dead", "k"],
        &[("A", &works), ("B", &takes_over), ("O", &[Open(Retry), Commit])],
        210,
    );
    assert!(seen.missed > 0 && seen.fenced > 0 && seen.waits > 0, "{seen:?}");
}

// ---- the checks see a violation -------------------------------------------------------------------------------------

#[test]
fn a_settle_with_the_name_and_epoch_of_another_worker_is_detected() {
    let works = [Whole(Claim), Whole(Forge)];
    let takes_over = [Whole(Take), Whole(Claim), Whole(Settle)];
    let mut stage = Stage::new(&[("A", &works), ("B", &takes_over)]);
    for (order, found) in [
        (vec![0, 0, 1, 1, 1], false), // before the takeover A still owns the message
        (vec![0, 1, 1, 0, 1], true),
        (vec![0, 1, 1, 1, 0], false), // B settled first
    ] {
        let run = stage.play(&["k"], &order);
        assert_eq!(!judge(&run).is_empty(), found, "{:?}: {:#?}", run.played, judge(&run));
    }
}

/// Changes a correct run into a wrong one.
type Forgery<'a> = &'a dyn Fn(&mut Run);

#[test]
fn each_check_detects_its_violation() {
    let works = [Whole(Claim), Whole(Settle)];
    let takes_over = [Whole(Take), Whole(Claim), Whole(Settle)];
    let mut stage = Stage::new(&[("A", &works), ("B", &takes_over)]);
    let run = stage.play(&["k", "k"], &[0, 1, 0, 1, 1]);
    assert!(judge(&run).is_empty(), "{:#?}", judge(&run));
    let claim_of = |run: &Run, epoch: i64| {
        let is_it = |event: &Event| event.epoch == epoch && matches!(event.what, What::Claimed { .. });
        run.events.iter().position(is_it).expect("a claim")
    };
    let (first, second) = (run.epoch_of("A"), run.epoch_of("B"));
    let forgeries: [(&str, Forgery); 10] = [
        ("doubled", &|run| run.history.push(run.history[0])),
        ("lost", &|run| run.history.truncate(1)),
        ("left behind", &|run| run.left = 1),
        ("discarded", &|run| run.history[0].1 = true),
        ("sent before", &|run| run.sent.reverse()),
        ("out of order", &|run| {
            let at = claim_of(run, second);
            run.rows_of(at).reverse();
        }),
        ("claimed again", &|run| {
            let again = run.events[claim_of(run, second)].clone();
            run.events.push(again);
        }),
        ("not claimed", &|run| {
            let at = claim_of(run, second);
            run.rows_of(at).pop();
        }),
        ("after it lost", &|run| {
            let at = claim_of(run, first);
            run.events[at].began = run.events.last().expect("events").ended;
        }),
        ("changed 2", &|run| {
            let settled = |event: &&mut Event| event.epoch == first && matches!(event.what, What::Settled { .. });
            let event = run.events.iter_mut().find(settled).expect("a settle");
            if let What::Settled { changed, .. } = &mut event.what {
                *changed = 2;
            }
        }),
    ];
    for (complaint, forge) in forgeries {
        let mut forged = run.clone();
        forge(&mut forged);
        let complaints = judge(&forged);
        assert!(
            complaints.iter().any(|c| c.contains(complaint)),
            "{complaint}: {complaints:#?}"
        );
    }
}

// ---- the stage ------------------------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug)]
enum Op {
    /// Expires the lease, whichever worker has it, and takes it.
    Take,
    Claim,
    /// Settles what was sent; messages that a claim may not send yet are claimed again instead.
    Settle,
    /// Settles in the name and with the epoch of the other worker.
    Forge,
    Publish(&'static str),
    /// Discards the first message of the backlog; `Hold` and `Retry` use the same message.
    Discard,
    /// Locks the row of that message.
    Hold,
    Retry,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Begins a transaction with this operation, and leaves it open.
    Open(Op),
    Commit,
    Rollback,
    /// Begins a transaction with this operation, and commits it.
    Whole(Op),
}

type Actor<'a> = (&'static str, &'a [Step]);

#[derive(Clone, Debug)]
struct Row {
    tid: String,
    seq: i64,
    key: String,
    token: i64,
}

enum Answer {
    Took(i64),
    Claimed(Vec<Row>, bool),
    Plain(What),
    Over,
}

type Command = Box<dyn FnOnce(&mut Client) -> Result<Answer, postgres::Error> + Send>;
type Answered = (usize, Result<Answer, postgres::Error>);

struct Player {
    name: &'static str,
    pid: i32,
    commands: Sender<Command>,
    owed: VecDeque<Step>,
    /// The step without an answer so far, and when it began.
    under_way: Option<(Step, Moment)>,
    /// The index in `Run::events` of the open transaction.
    open: Option<usize>,
    epoch: i64,
    /// Rows claimed in the open transaction.
    fresh: Vec<Row>,
    /// Rows that are claimed, and may not be sent yet.
    parked: Vec<Row>,
    /// Rows that are sent and not settled.
    sent: Vec<Row>,
}

struct Stage {
    steps: Vec<Vec<Step>>,
    players: Vec<Player>,
    answers: Receiver<Answered>,
    observer: Client,
    moment: Moment,
    first_seq: i64,
    run: Run,
    /// Dropped last, when the sessions have ended.
    _cluster: Cluster,
}

/// Counts of the situations over all interleavings, so that no test passes without the situation that it tests.
#[derive(Debug, Default)]
struct Seen {
    /// Claims that skipped rows which another session had changed meanwhile.
    missed: usize,
    /// Settles of messages under a lost lease.
    fenced: usize,
    /// Times that all steps under way waited for a lock.
    waits: usize,
    /// Messages sent again, once for each repetition.
    repeats: usize,
}

impl Seen {
    fn add(&mut self, run: &Run) {
        for event in &run.events {
            match &event.what {
                What::Claimed { missed: true, .. } => self.missed += 1,
                What::Settled { rows, .. } if !rows.is_empty() && run.superseded(event.epoch, event.began) => {
                    self.fenced += 1;
                }
                _ => {}
            }
        }
        self.waits += run.waits;
        self.repeats += run.sent.len() - run.sent.iter().collect::<HashSet<_>>().len();
    }
}

/// Plays every interleaving of the actors on a backlog of these keys. `expected` is their number, so that none is left
/// out.
fn play_all(backlog: &[&'static str], actors: &[Actor], expected: usize) -> Seen {
    let mut stage = Stage::new(actors);
    let lengths: Vec<usize> = actors.iter().map(|(_, steps)| steps.len()).collect();
    let orders = interleavings(&lengths);
    assert_eq!(orders.len(), expected);
    let (mut failed, mut seen) = (Vec::new(), Seen::default());
    for order in &orders {
        let run = stage.play(backlog, order);
        seen.add(&run);
        let complaints = judge(&run);
        if !complaints.is_empty() {
            failed.push(format!("{}\n  {}", run.played.join(", "), complaints.join("\n  ")));
        }
    }
    let some: Vec<&String> = failed.iter().take(5).collect();
    assert!(failed.is_empty(), "{} of {expected} fail:\n{some:#?}", failed.len());
    seen
}

fn interleavings(lengths: &[usize]) -> Vec<Vec<usize>> {
    let total: usize = lengths.iter().sum();
    let mut all = vec![Vec::new()];
    for _ in 0..total {
        let longer = |order: Vec<usize>| {
            (0..lengths.len()).filter_map(move |actor| {
                let done = order.iter().filter(|played| **played == actor).count();
                (done < lengths[actor]).then(|| [order.as_slice(), &[actor]].concat())
            })
        };
        all = all.into_iter().flat_map(longer).collect();
    }
    all
}

impl Stage {
    fn new(actors: &[Actor]) -> Self {
        // Maintenance would create partitions, and hold up a settle.
        let conf = [NOTHING_RUNS, "outbox.partition_count = 1", "autovacuum = off"];
        let builder = conf.iter().fold(Cluster::builder(), |builder, line| builder.conf(line));
        let cluster = builder.start();
        cluster.exec(DB, "create extension outbox");
        let (answer, answers) = channel();
        let drains: Actor = ("C", &[]);
        let cast = actors.iter().chain([&drains]).enumerate();
        let players = cast.map(|(index, (name, _))| Player::new(index, name, cluster.connect(DB), answer.clone()));
        Self {
            steps: actors.iter().map(|(_, steps)| steps.to_vec()).collect(),
            players: players.collect(),
            answers,
            observer: cluster.connect(DB),
            moment: 0,
            first_seq: 0,
            run: Run::default(),
            _cluster: cluster,
        }
    }

    fn play(&mut self, backlog: &[&'static str], order: &[usize]) -> Run {
        self.reset(backlog);
        let mut next = vec![0; self.steps.len()];
        for actor in order {
            let step = self.steps[*actor][next[*actor]];
            next[*actor] += 1;
            self.run.played.push(format!("{} {step:?}", self.players[*actor].name));
            self.players[*actor].owed.push_back(step);
            self.go_on();
        }
        let waits = |player: &Player| player.under_way.is_some() || player.open.is_some();
        assert!(!self.players.iter().any(waits), "not over: {:?}", self.run.played);
        self.drain();
        let rows = self.observer.query("select seq, discarded from outbox_history", &[]);
        self.run.history = rows
            .expect("the history")
            .iter()
            .map(|row| (row.get(0), row.get(1)))
            .collect();
        let left = "select (select count(*) from outbox) + (select count(*) from outbox_waiting)
                           + (select count(*) from outbox_dead)";
        self.run.left = self.observer.value(left);
        std::mem::take(&mut self.run)
    }

    /// Empties the tables, and publishes a backlog of which the messages of key `dead` are dead letters; A has the
    /// lease.
    fn reset(&mut self, backlog: &[&'static str]) {
        self.observer.run(
            "delete from outbox; delete from outbox_waiting; delete from outbox_dead; delete from outbox_history;
                 delete from outbox_events; update outbox_partitions set lease_owner = null, lease_until = null",
        );
        self.moment = 0;
        self.run = Run::default();
        for key in backlog {
            let seq = self
                .observer
                .query_one("select outbox_publish('T', '{}', null, $1)", &[key]);
            let seq = seq.expect("publish").get(0);
            let committed = if *key == "dead" { Moment::MAX } else { 0 };
            self.note(Event {
                actor: "-",
                epoch: 0,
                what: What::Published { seq, key },
                began: 0,
                ended: 0,
                committed: Some(committed),
            });
        }
        let first: i64 = self.observer.value("select min(seq) from outbox");
        self.first_seq = first;
        let dies = "with gone as (delete from outbox where key = 'dead' returning *)
                    insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
                    select seq, enqueued_at, 1, partition, destination, key, 'x' from gone";
        self.observer.run(dies);
        for player in &mut self.players {
            player.fresh.clear();
            player.parked.clear();
            player.sent.clear();
            player.epoch = 0;
        }
        self.moment = 1;
        self.players[0].owed.push_back(Whole(Take));
        self.go_on();
    }

    fn note(&mut self, event: Event) -> usize {
        self.run.events.push(event);
        self.run.events.len() - 1
    }

    fn drain(&mut self) {
        let last = self.players.len() - 1;
        self.players[last]
            .owed
            .extend([Whole(Take), Whole(Claim), Whole(Settle), Whole(Claim)]);
        self.go_on();
        let claimed = self.run.events.iter().rev().find_map(|event| match &event.what {
            What::Claimed { rows, missed } => Some(rows.is_empty() && !missed),
            _ => None,
        });
        assert_eq!(claimed, Some(true), "C has drained: {:?}", self.run.played);
    }

    /// Starts the next step of each player that has one and is not waiting for an answer.
    fn go_on(&mut self) {
        let idle = |player: &Player| player.under_way.is_none() && !player.owed.is_empty();
        while let Some(actor) = self.players.iter().position(idle) {
            let step = self.players[actor].owed.pop_front().expect("a step");
            let command = self.command(actor, step);
            self.moment += 1;
            self.players[actor].under_way = Some((step, self.moment));
            self.players[actor].commands.send(command).expect("a session");
            // A step that this one unblocks ends after it.
            let mut answered = self.answered();
            answered.sort_by_key(|(who, _)| *who != actor);
            for (who, answer) in answered {
                self.moment += 1;
                self.ended(who, answer);
            }
        }
    }

    /// The answers that arrive until each player under way has answered or waits for a lock.
    fn answered(&mut self) -> Vec<Answered> {
        let started = Instant::now();
        let mut answered: Vec<Answered> = Vec::new();
        loop {
            let done: HashSet<usize> = answered.iter().map(|(who, _)| *who).collect();
            let players = self.players.iter().enumerate();
            let waiting: Vec<i32> = players
                .filter(|(who, player)| player.under_way.is_some() && !done.contains(who))
                .map(|(_, player)| player.pid)
                .collect();
            if waiting.is_empty() {
                return answered;
            }
            let patience = Duration::from_millis(if done.is_empty() { 2 } else { 0 });
            if let Ok(answer) = self.answers.recv_timeout(patience) {
                answered.push(answer);
                continue;
            }
            let blocked = "select count(*) from unnest($1::int[]) pid where cardinality(pg_blocking_pids(pid)) > 0";
            let blocked: i64 = self.observer.query_one(blocked, &[&waiting]).expect("locks").get(0);
            if blocked == waiting.len() as i64 {
                self.run.waits += 1;
                return answered;
            }
            assert!(started.elapsed() < LONG, "a step does not end: {:?}", self.run.played);
        }
    }

    fn command(&mut self, actor: usize, step: Step) -> Command {
        let op = match step {
            Commit => return plainly("commit"),
            Rollback => return plainly("rollback"),
            Open(op) | Whole(op) => op,
        };
        let other = &self.players[1 - actor.min(1)];
        let (other, others_epoch) = (other.name, other.epoch);
        let player = &mut self.players[actor];
        let (name, epoch, seq) = (player.name, player.epoch, self.first_seq);
        match op {
            Take => Box::new(move |client| take(client, name)),
            Settle if player.sent.is_empty() && !player.parked.is_empty() => {
                Box::new(move |client| claim(client, name, epoch))
            }
            Claim => Box::new(move |client| claim(client, name, epoch)),
            Settle => {
                let rows = std::mem::take(&mut player.sent);
                Box::new(move |client| settle(client, name, rows))
            }
            Forge => {
                let mut rows = std::mem::take(&mut player.sent);
                let after = others_epoch > epoch;
                rows.iter_mut()
                    .filter(|_| after)
                    .for_each(|row| row.token = others_epoch);
                Box::new(move |client| settle(client, if after { other } else { name }, rows))
            }
            Publish(key) => Box::new(move |client| publish(client, key)),
            Discard => Box::new(move |client| discard(client, seq)),
            Hold => Box::new(move |client| {
                client.batch_execute(&format!("begin; select from outbox where seq = {seq} for update"))?;
                Ok(Answer::Plain(What::Nothing))
            }),
            Retry => Box::new(move |client| {
                client.batch_execute("begin")?;
                let done = client.query_one("select outbox_retry($1)", &[&seq])?.get(0);
                Ok(Answer::Plain(What::Retried { seq, done }))
            }),
        }
    }

    fn ended(&mut self, who: usize, answer: Result<Answer, postgres::Error>) {
        let moment = self.moment;
        let (step, began) = self.players[who].under_way.take().expect("a step");
        let player = &mut self.players[who];
        let what = match answer {
            Ok(Answer::Over) => return self.over(who, matches!(step, Commit)),
            Ok(Answer::Took(epoch)) => {
                player.epoch = epoch;
                What::Took
            }
            Ok(Answer::Claimed(rows, missed)) => {
                player.fresh = rows;
                What::Claimed {
                    rows: player.fresh.iter().map(|row| row.seq).collect(),
                    missed,
                }
            }
            Ok(Answer::Plain(what)) => what,
            Err(error) => What::Failed(format!("{error:?}")),
        };
        let (actor, epoch) = (player.name, player.epoch);
        let event = Event {
            actor,
            epoch,
            what,
            began,
            ended: moment,
            committed: None,
        };
        let open = self.note(event);
        self.players[who].open = Some(open);
        if matches!(step, Whole(_)) {
            self.players[who].owed.push_front(Commit);
        }
    }

    fn over(&mut self, who: usize, committed: bool) {
        let open = self.players[who].open.take().expect("a transaction");
        let fresh = std::mem::take(&mut self.players[who].fresh);
        if !committed {
            return;
        }
        self.run.events[open].committed = Some(self.moment);
        if let What::Claimed { missed, .. } = self.run.events[open].what {
            self.players[who].parked.extend(fresh);
            if !missed {
                self.send(who, open);
            }
        }
    }

    /// Sends the messages that this claim allows: none behind a message of its key that was not committed when the
    /// claim began.
    fn send(&mut self, who: usize, claim: usize) {
        let (began, ended) = (self.run.events[claim].began, self.run.events[claim].ended);
        let mut rows = std::mem::take(&mut self.players[who].parked);
        rows.sort_by_key(|row| row.seq);
        for row in rows {
            let held = self.run.events.iter().any(|event| match event.what {
                What::Published { seq, key } => {
                    key == row.key && seq < row.seq && event.ended < ended && !event.committed_before(began)
                }
                _ => false,
            });
            if held {
                self.players[who].parked.push(row);
            } else {
                self.run.sent.push(row.seq);
                self.players[who].sent.push(row);
            }
        }
    }
}

impl Player {
    fn new(index: usize, name: &'static str, mut client: Client, answer: Sender<Answered>) -> Self {
        let pid = client.value("select pg_backend_pid()");
        let (commands, received) = channel::<Command>();
        std::thread::spawn(move || {
            for command in received {
                if answer.send((index, command(&mut client))).is_err() {
                    return;
                }
            }
        });
        Self {
            name,
            pid,
            commands,
            owed: VecDeque::new(),
            under_way: None,
            open: None,
            epoch: 0,
            fresh: Vec::new(),
            parked: Vec::new(),
            sent: Vec::new(),
        }
    }
}

// ---- the statements, as src/worker/store calls them -----------------------------------------------------------------

fn plainly(sql: &'static str) -> Command {
    Box::new(move |client| client.batch_execute(sql).map(|()| Answer::Over))
}

fn take(client: &mut Client, worker: &str) -> Result<Answer, postgres::Error> {
    // While a settle holds the lease, no worker takes it over. A real worker retries later; this one waits.
    client.batch_execute(
        "begin; select from outbox_partitions for update; update outbox_partitions set lease_until = now() - interval '1 s'",
    )?;
    let sql = "select lease_epoch from outbox_internal.lease_take($1, '{0}', 3600)";
    Ok(Answer::Took(client.query_one(sql, &[&worker])?.get(0)))
}

fn claim(client: &mut Client, worker: &str, epoch: i64) -> Result<Answer, postgres::Error> {
    client.batch_execute("begin")?;
    let sql = "select tid::text, seq, key, claim_token, remark
               from outbox_internal.claim($1, 'default', '{0}', array[$2::bigint], '{100}', '{0}', 1000000)";
    let (mut rows, mut missed) = (Vec::new(), false);
    for row in client.query(sql, &[&worker, &epoch])? {
        match row.get::<_, Option<&str>>(4) {
            Some(remark) => missed |= remark == "missed",
            None => rows.push(Row {
                tid: row.get(0),
                seq: row.get(1),
                key: row.get(2),
                token: row.get(3),
            }),
        }
    }
    Ok(Answer::Claimed(rows, missed))
}

/// Settles by ctid, then locates by seq the rows that were not found, and settles again.
fn settle(client: &mut Client, worker: &str, rows: Vec<Row>) -> Result<Answer, postgres::Error> {
    client.batch_execute("begin")?;
    let (seqs, tokens): (Vec<i64>, Vec<i64>) = rows.iter().map(|row| (row.seq, row.token)).unzip();
    let mut tids: Vec<String> = rows.into_iter().map(|row| row.tid).collect();
    let mut changed = 0;
    for again in [true, false] {
        if changed < seqs.len() {
            let sql = "select outbox_internal.settle($1, $2::text[]::tid[], $3, array_fill('default'::text, array[n]),
                         array_fill(0::smallint, array[n]), $4, array_fill('p'::\"char\", array[n]),
                         array_fill(0::bigint, array[n]), array_fill(null::text, array[n]), array_fill(null::text, array[n]))
                       from cardinality($3::bigint[]) n";
            let row = client.query_one(sql, &[&worker, &tids, &seqs, &tokens])?;
            changed += row.get::<_, i32>(0) as usize;
        }
        if again && changed < seqs.len() {
            let sql = "select outbox_internal.locate($1, array_fill('default'::text, array[n]),
                                            array_fill(0::smallint, array[n]))::text[]
                       from cardinality($1::bigint[]) n";
            tids = client.query_one(sql, &[&seqs])?.get(0);
        }
    }
    Ok(Answer::Plain(What::Settled { rows: seqs, changed }))
}

fn publish(client: &mut Client, key: &'static str) -> Result<Answer, postgres::Error> {
    client.batch_execute("begin")?;
    let row = client.query_one("select outbox_publish('T', '{}', null, $1)", &[&key])?;
    Ok(Answer::Plain(What::Published { seq: row.get(0), key }))
}

/// Discards a message; one that is in flight is refused.
fn discard(client: &mut Client, seq: i64) -> Result<Answer, postgres::Error> {
    client.batch_execute("begin")?;
    let done = match client.query_one("select outbox_discard($1)", &[&seq]) {
        Ok(row) => row.get(0),
        Err(error) if error.code() == Some(&postgres::error::SqlState::OBJECT_IN_USE) => false,
        Err(error) => return Err(error),
    };
    Ok(Answer::Plain(What::Discarded { seq, done }))
}
