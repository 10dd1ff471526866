//! How fast is the publisher of HTTP destinations, next to bare ureq? Run by hand: cargo run --release --example
//! http_rate [rounds] [messages] [ms] [concurrency]. Both post 300-byte bodies to one receiver in this process, which
//! answers each request after [ms], in turn.
//!
//! The bare loop is the plainest fast form: [concurrency] threads that share one counter, each with its own agent.

use outbox_transport::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

fn main() {
    let arguments: Vec<usize> = std::env::args().skip(1).map(|a| a.parse().unwrap()).collect();
    let argument = |n: usize, default| arguments.get(n).copied().unwrap_or(default);
    let (rounds, count, concurrency) = (argument(0, 7), argument(1, 4_000), argument(3, 8));
    let port = receiver(Duration::from_millis(argument(2, 5) as u64));
    let url = format!("http://127.0.0.1:{port}/hook");
    let config = HttpConfig {
        allow: AllowList::parse("127.0.0.0/8").unwrap(),
        concurrency,
        ..HttpConfig::new(parse_http_url(&url).unwrap())
    };
    let mut publisher = Publisher::start(config, Waker::new().unwrap()).unwrap();
    let (mut rates, mut bare_rates) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        // Which one goes first alternates.
        for turn in 0..2 {
            let bare = (round + turn) % 2 == 0;
            let started = Instant::now();
            if bare {
                bare_run(&url, count, concurrency);
            } else {
                run(&mut publisher, count);
            }
            let rate = count as f64 / started.elapsed().as_secs_f64();
            println!("{:9} {rate:8.0}/s", if bare { "bare" } else { "publisher" });
            if bare { bare_rates.push(rate) } else { rates.push(rate) }
        }
    }
    let (rate, bare_rate) = (median(&mut rates), median(&mut bare_rates));
    println!(
        "median: publisher {rate:.0}/s, bare {bare_rate:.0}/s, ratio {:.2}",
        rate / bare_rate
    );
    assert!(publisher.stop(Duration::from_secs(5)));
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn receiver(pause: Duration) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            std::thread::spawn(move || serve(stream, pause));
        }
    });
    port
}

fn serve(mut stream: TcpStream, pause: Duration) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
        }
        reader.read_exact(&mut vec![0; length])?;
        std::thread::sleep(pause);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")?;
    }
}

fn message(handle: u64) -> Publication {
    Publication {
        handle,
        address: Text::default(),
        key: Some(format!("key {}", handle % 100)),
        properties: Properties {
            message_id: format!("0190a0c2-0000-7000-8000-{handle:012}"),
            content_type: "application/json".into(),
            ..Properties::default()
        },
        body: vec![b'x'; 300],
    }
}

fn run(publisher: &mut Publisher, count: usize) {
    let mut batches = (0..count as u64).step_by(500).map(|first| {
        (first..(first + 500).min(count as u64))
            .map(message)
            .collect::<Vec<_>>()
    });
    let (mut next, mut done) = (batches.next(), 0);
    while done < count {
        while let Some(batch) = next.take() {
            match publisher.try_publish(batch) {
                Ok(()) => next = batches.next(),
                Err(batch) => {
                    next = Some(batch);
                    break;
                }
            }
        }
        let mut poll = libc::pollfd {
            fd: publisher.waker().fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one live pollfd.
        unsafe { libc::poll(&mut poll, 1, 10_000) };
        publisher.waker().clear();
        for event in publisher.drain() {
            if let PublisherEvent::Outcomes(outcomes) = event {
                assert!(outcomes.iter().all(|o| o.outcome == Outcome::Confirmed));
                done += outcomes.len();
            }
        }
    }
}

fn bare_run(url: &str, count: usize, threads: usize) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let agent: ureq::Agent = ureq::Agent::config_builder().proxy(None).build().into();
                while next.fetch_add(1, Ordering::Relaxed) < count {
                    let request = agent.post(url).content_type("application/json");
                    let mut answer = request.send(&[b'x'; 300][..]).unwrap();
                    answer.body_mut().read_to_vec().unwrap();
                }
            });
        }
    });
}
