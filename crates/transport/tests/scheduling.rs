//! What a worker requests from the kernel for its threads. One test in a file of its own, because it concerns all
//! threads of a process.

use outbox_transport::Scheduling;
use std::sync::mpsc;

const SLICE_NS: u64 = 500_000;

fn attributes(thread: i32) -> libc::sched_attr {
    // SAFETY: plain data of the given size.
    unsafe {
        let mut attr: libc::sched_attr = std::mem::zeroed();
        let size = size_of::<libc::sched_attr>();
        assert_eq!(
            libc::syscall(libc::SYS_sched_getattr, thread, &raw mut attr, size, 0),
            0
        );
        attr
    }
}

/// The policy, the nice value and the slice of a thread. A kernel without slices reports none.
fn of(thread: i32) -> (i32, i32, u64) {
    let attr = attributes(thread);
    (attr.sched_policy as i32, attr.sched_nice, attr.sched_runtime)
}

/// A thread that lives until its sender is dropped, and its number.
fn start() -> (mpsc::Sender<()>, i32) {
    let ((end, ended), (tell, told)) = (mpsc::channel::<()>(), mpsc::channel());
    std::thread::spawn(move || {
        // SAFETY: no arguments, and it cannot fail.
        let _ = tell.send(unsafe { libc::gettid() });
        let _ = ended.recv();
    });
    (end, told.recv().expect("a thread"))
}

#[test]
fn threads_have_short_slices_and_in_a_backlog_let_others_go_on() {
    let before = of(0);
    let mut scheduling = Scheduling::begin();
    let (_end, thread) = start();
    let slice = |ns| if before.2 > 0 { ns } else { 0 };
    let short = (libc::SCHED_OTHER, before.1, slice(SLICE_NS));
    let batch = (libc::SCHED_BATCH, before.1);
    scheduling.follow(false);
    assert_eq!((of(0), of(thread)), (short, short));
    scheduling.follow(true);
    let (_end, started_in_backlog) = start();
    for thread in [0, thread, started_in_backlog] {
        let (policy, nice, slice) = of(thread);
        assert_eq!((policy, nice), batch);
        assert_ne!(slice, SLICE_NS);
    }
    scheduling.follow(true);
    scheduling.follow(false);
    assert_eq!([of(0), of(thread), of(started_in_backlog)], [short; 3]);

    // An administrator has chosen the policy of one thread, then that of the process.
    let (_end, chosen) = start();
    let request = |thread, policy| {
        let mut attr = attributes(thread);
        attr.sched_policy = policy as u32;
        // SAFETY: plain data that contains its own size.
        let result = unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const attr, 0) };
        assert_eq!(result, 0);
    };
    request(chosen, libc::SCHED_IDLE);
    scheduling.follow(true);
    scheduling.follow(false);
    assert_eq!((of(0), of(chosen).0), (short, libc::SCHED_IDLE));
    request(0, libc::SCHED_BATCH);
    let mut scheduling = Scheduling::begin();
    scheduling.follow(true);
    scheduling.follow(false);
    assert_eq!(of(0).0, libc::SCHED_BATCH);
}
