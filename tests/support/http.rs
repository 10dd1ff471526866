//! Requests to a monitor as a program makes them, byte by byte: headers that no browser would send, and no implicit
//! ones.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::wait::{LONG, patient};

/// The response.
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut found = self
            .headers
            .iter()
            .filter(|(known, _)| known.eq_ignore_ascii_case(name));
        found.next().map(|(_, value)| value.as_str())
    }
}

/// Sends a request and reads to the end, with a Host header unless `headers` has one.
pub fn ask(port: u16, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("connect to the monitor");
    stream.set_read_timeout(Some(patient(LONG))).expect("a timeout");
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {}\r\n",
        body.len()
    );
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        request += &format!("Host: 127.0.0.1:{port}\r\n");
    }
    for (name, value) in headers {
        request += &format!("{name}: {value}\r\n");
    }
    request += "\r\n";
    request += body;
    stream.write_all(request.as_bytes()).expect("send a request");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("read the answer");
    read(&String::from_utf8_lossy(&answer))
}

fn read(answer: &str) -> Answer {
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
    let pair = |line: &str| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_owned(), value.trim().to_owned()))
    };
    Answer {
        status: status.unwrap_or_else(|| panic!("no status: {head}")),
        headers: lines.filter_map(pair).collect(),
        body: body.to_owned(),
    }
}
