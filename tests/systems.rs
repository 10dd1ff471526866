//! The black-box tests that need other systems: a clean Debian, programs of other languages, a browser, Prometheus.

mod cloudevents;
mod consumers;
mod demo;
mod examples;
mod migrations;
mod packages;
mod publishing;
mod readers;
mod readme;
mod serve;
