//! Limits what a peer can make lapin parse. Holds the socket that lapin reads through, plain or TLS, and the means to
//! cut a connection.
//!
//! Read and written on the thread `lapin-io-loop`; created and shut down on the publisher thread.
//!
//! The trap: lapin parses all that arrives, before and after login, by recursion, and checks the frame size only
//! afterwards. Nested arrays take 5 bytes a level on the wire and 1.5 kB a level on the stack (9 kB in a debug build).
//! So 10 kB overflow Rust's default stack, and lapin's 4 MB receive buffer would overflow any reasonable stack. A stack
//! overflow is SIGSEGV, and that restarts the user's whole database server. So this module measures the frames, and how
//! deep they nest, before lapin sees them. What an honest broker sends never comes near these limits.

use super::nesting::Nesting;
use crate::connected::Wire;
use crate::transfer::unacknowledged;
use async_rs::traits::{Executor, Reactor, RuntimeKit};
use async_rs::util::Task;
use async_rs::{Runtime, Tokio};
use futures_core::Stream;
use futures_io::{AsyncRead, AsyncWrite};
use std::future::Future;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead as TokioRead, AsyncWrite as TokioWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio_rustls::client::TlsStream;

/// The frame size that is negotiated with the broker, in bytes, and the limit of a frame. All properties of a message must
/// fit into one: the most headers take 64 KiB, and the other properties 255 bytes each. lapin has two buffers of 32 frames
/// for each connection, so RabbitMQ's default of 128 KiB would take nearly twice as much memory.
pub(crate) const FRAME_BYTES_MAX: u32 = 72 * 1024;
/// A method frame carries a table only in `connection.start` (about 500 bytes from RabbitMQ 3.10).
const METHOD_BYTES_MAX: u32 = 16_384;

/// One TCP connection, seen from the publisher thread. Dropping it shuts down the socket, which ends lapin's thread.
///
/// Without this, each timed-out connect would leave a thread, two sockets and 8 MB behind. The I/O thread of lapin
/// waits for the peer forever, and dropping the future that waits for that thread does not change it.
pub(crate) struct SocketHandle {
    sent: SentBytes,
    /// The sender lives in lapin's I/O thread and is never used. When it is dropped, the thread has ended.
    thread_ended: oneshot::Receiver<()>,
}

/// When bytes last arrived. Written by lapin's I/O thread, read by the publisher thread.
#[derive(Clone, Debug)]
pub(crate) struct LastBytes(Arc<Mutex<Instant>>);

impl LastBytes {
    fn at_mut(&self) -> MutexGuard<'_, Instant> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn at(&self) -> Instant {
        *self.at_mut()
    }
}

/// The bytes that lapin has sent. Its I/O thread counts them, the publisher thread reads them.
#[derive(Clone, Debug)]
pub(crate) struct SentBytes(Arc<SentState>);

#[derive(Debug)]
struct SentState {
    /// A second handle of the socket that lapin owns.
    socket: std::net::TcpStream,
    written: AtomicU64,
}

impl SentBytes {
    pub(crate) fn written(&self) -> u64 {
        self.0.written.load(Ordering::Relaxed)
    }

    /// The bytes that the peer has acknowledged. With TLS, up to 64 kB of them may still be here.
    pub(crate) fn taken(&self) -> u64 {
        let written = self.written(); // first: what is written meanwhile must not count
        written.saturating_sub(unacknowledged(&self.0.socket))
    }

    fn shut_down(&self) {
        let _ = self.0.socket.shutdown(Shutdown::Both);
    }
}

/// lapin's I/O thread drops it when it ends.
pub(crate) struct ThreadMark(#[expect(dead_code, reason = "its drop is the message")] oneshot::Sender<()>);

impl SocketHandle {
    pub(crate) fn new(stream: Socket) -> io::Result<(Self, GuardedStream, ThreadMark)> {
        let socket = stream.tcp().as_fd().try_clone_to_owned()?.into();
        let written = AtomicU64::new(0);
        let sent = SentBytes(Arc::new(SentState { socket, written }));
        let (mark, thread_ended) = oneshot::channel();
        let guarded = GuardedStream {
            inner: stream,
            frames: FrameGuard::default(),
            sent: sent.clone(),
            last_bytes: LastBytes(Arc::new(Mutex::new(Instant::now()))),
        };
        Ok((Self { sent, thread_ended }, guarded, ThreadMark(mark)))
    }

    pub(crate) fn sent_bytes(&self) -> SentBytes {
        self.sent.clone()
    }
}

impl Wire for SocketHandle {
    /// Completes once lapin's I/O thread has ended: end of file, error, panic.
    async fn ended(&mut self) {
        // A oneshot receiver panics when it is polled again after it has completed.
        if !self.thread_ended.is_terminated() {
            let _ = (&mut self.thread_ended).await;
        }
    }

    async fn cut(&mut self, limit: Duration) -> bool {
        self.sent.shut_down();
        tokio::time::timeout(limit, self.ended()).await.is_ok()
    }
}

impl Drop for SocketHandle {
    fn drop(&mut self) {
        self.sent.shut_down();
    }
}

/// The state of the incoming protocol, as far as needed to limit what the parser gets.
#[derive(Debug, Default)]
struct FrameGuard {
    /// Type, channel and size of the next frame, as far as they have been read.
    head: [u8; 7],
    head_bytes: usize,
    /// Bytes of payload and end octet that have not arrived yet.
    remaining_bytes: u32,
    nesting: Nesting,
}

const FRAME_METHOD: u8 = 1;
const FRAME_CONTENT_HEADER: u8 = 2;
const FRAME_BODY: u8 = 3;
const FRAME_HEARTBEAT: u8 = 8;

impl FrameGuard {
    fn accept(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while let Some(&first) = bytes.first() {
            if self.remaining_bytes > 0 {
                let (payload, rest) = bytes.split_at(bytes.len().min(self.remaining_bytes as usize));
                self.nesting.accept(payload).map_err(|why| violation(why.to_owned()))?;
                self.remaining_bytes -= payload.len() as u32;
                bytes = rest;
                continue;
            }
            self.head[self.head_bytes] = first;
            self.head_bytes += 1;
            bytes = &bytes[1..];
            if self.head_bytes == 1 {
                check_kind(first)?;
            } else if self.head_bytes == self.head.len() {
                self.begin_frame()?;
            }
        }
        Ok(())
    }

    fn begin_frame(&mut self) -> io::Result<()> {
        let [kind, _, _, size @ ..] = self.head;
        let size = u32::from_be_bytes(size);
        let limit = if kind == FRAME_METHOD {
            METHOD_BYTES_MAX
        } else {
            FRAME_BYTES_MAX
        };
        if size > limit {
            return Err(violation(format!(
                "the peer sent a frame of {size} bytes; the limit is {limit}"
            )));
        }
        (self.head_bytes, self.remaining_bytes) = (0, size + 1);
        match kind {
            FRAME_METHOD => self.nesting.begin_method(),
            FRAME_CONTENT_HEADER => self.nesting.begin_content_header(),
            _ => self.nesting.begin_other(),
        }
        Ok(())
    }
}

fn check_kind(kind: u8) -> io::Result<()> {
    match kind {
        FRAME_METHOD | FRAME_CONTENT_HEADER | FRAME_BODY | FRAME_HEARTBEAT => Ok(()),
        // A server answers "AMQP" and its version to a client with an unsupported version.
        b'A' => Err(violation("the peer does not speak AMQP 0-9-1".to_owned())),
        b'H' => Err(violation(
            "the peer speaks HTTP, not AMQP: 15672 is the management port of RabbitMQ; the port for AMQP is 5672, or 5671 with TLS"
                .to_owned(),
        )),
        // An alert or a handshake record: the answer of a TLS server to the AMQP protocol header.
        0x15 | 0x16 => Err(violation(
            "the peer speaks TLS, but the URL does not start with amqps://".to_owned(),
        )),
        other => Err(violation(format!(
            "the peer does not speak AMQP: a frame began with byte 0x{other:02x}"
        ))),
    }
}

fn violation(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// A connection to the peer. With TLS the handshake is complete; decrypted bytes go through the same guard.
#[derive(Debug)]
pub(crate) enum Socket {
    Plain(TcpStream),
    /// Buffers up to 64 kB of what lapin wrote, in addition to the kernel's buffer, and sends it when lapin flushes.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Socket {
    fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(tls) => tls.get_ref().0,
        }
    }
}

/// The socket that lapin reads and writes.
#[derive(Debug)]
pub(crate) struct GuardedStream {
    inner: Socket,
    frames: FrameGuard,
    last_bytes: LastBytes,
    sent: SentBytes,
}

trait ReadWrite: TokioRead + TokioWrite + Unpin {}

impl<T: TokioRead + TokioWrite + Unpin> ReadWrite for T {}

impl GuardedStream {
    pub(crate) fn last_bytes(&self) -> LastBytes {
        self.last_bytes.clone()
    }

    fn count(&self, written: usize) -> Poll<io::Result<usize>> {
        self.sent.0.written.fetch_add(written as u64, Ordering::Relaxed);
        Poll::Ready(Ok(written))
    }

    fn inner(&mut self) -> Pin<&mut dyn ReadWrite> {
        match &mut self.inner {
            Socket::Plain(tcp) => Pin::new(tcp),
            Socket::Tls(tls) => Pin::new(tls.as_mut()),
        }
    }
}

impl AsyncRead for GuardedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut [u8]) -> Poll<io::Result<usize>> {
        let mut read = ReadBuf::new(buf);
        ready!(self.inner().poll_read(cx, &mut read))?;
        self.frames.accept(read.filled())?;
        if !read.filled().is_empty() {
            *self.last_bytes.at_mut() = Instant::now();
        }
        Poll::Ready(Ok(read.filled().len()))
    }
}

impl AsyncWrite for GuardedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(self.inner().poll_write(cx, buf))?;
        self.count(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(self.inner().poll_write_vectored(cx, bufs))?;
        self.count(written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_shutdown(cx)
    }
}

/// The runtime for lapin: tokio's, with the guarded socket in place of tokio's.
#[derive(Clone, Debug)]
pub(crate) struct Kit(Tokio);

impl Kit {
    /// Uses the runtime of the calling thread.
    pub(crate) fn runtime() -> Runtime<Self> {
        Runtime::new(Self(Tokio::current()))
    }
}

impl RuntimeKit for Kit {}

impl Executor for Kit {
    type Task<T: Send + 'static> = <Tokio as Executor>::Task<T>;

    fn block_on<T, F: Future<Output = T>>(&self, f: F) -> T {
        self.0.block_on(f)
    }

    fn spawn<T: Send + 'static, F: Future<Output = T> + Send + 'static>(&self, f: F) -> Task<Self::Task<T>> {
        self.0.spawn(f)
    }

    fn spawn_blocking<T: Send + 'static, F: FnOnce() -> T + Send + 'static>(&self, f: F) -> Task<Self::Task<T>> {
        self.0.spawn_blocking(f)
    }
}

/// lapin gets its socket ready-made from `connect` and uses this trait only for timers.
impl Reactor for Kit {
    type TcpStream = GuardedStream;
    type Sleep = <Tokio as Reactor>::Sleep;

    #[expect(refining_impl_trait_internal, reason = "never called; the type must be named")]
    fn register<H: Send + 'static>(&self, _socket: H) -> io::Result<GuardedStream> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sleep(&self, dur: Duration) -> Self::Sleep {
        self.0.sleep(dur)
    }

    fn interval(&self, dur: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.0.interval(dur)
    }

    fn tcp_connect_addr(&self, _addr: SocketAddr) -> impl Future<Output = io::Result<GuardedStream>> + Send + 'static {
        std::future::ready(Err(io::ErrorKind::Unsupported.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::nesting::LEVELS_MAX;
    use super::*;
    use proptest::prelude::*;
    use std::future::poll_fn;
    use std::io::Write;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![kind, 0, 1];
        frame.extend((payload.len() as u32).to_be_bytes());
        frame.extend(payload);
        frame.push(0xce);
        frame
    }

    /// A payload whose table has this number of levels.
    fn nested(kind: u8, levels: usize) -> Vec<u8> {
        let mut table = Vec::new();
        for _ in 0..levels {
            let begin: &[u8] = if table.is_empty() { &[] } else { b"\x01xF" };
            let inner = [begin, &table].concat();
            table = [&(inner.len() as u32).to_be_bytes(), &inner[..]].concat();
        }
        let before: &[u8] = match kind {
            FRAME_METHOD => &[0, 10, 0, 10, 0, 9],
            _ => &[0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0],
        };
        [before, &table].concat()
    }

    fn verdict(bytes: &[u8], chunk_bytes: usize) -> io::Result<()> {
        let mut guard = FrameGuard::default();
        bytes.chunks(chunk_bytes).try_for_each(|chunk| guard.accept(chunk))
    }

    #[test]
    fn frames_of_an_honest_broker_pass_in_any_chunks() {
        let bytes = [
            frame(FRAME_METHOD, &nested(FRAME_METHOD, 3)),
            frame(FRAME_HEARTBEAT, b""),
            frame(FRAME_CONTENT_HEADER, &nested(FRAME_CONTENT_HEADER, 1)),
            frame(FRAME_BODY, &nested(FRAME_CONTENT_HEADER, 500)),
            frame(FRAME_METHOD, b"\0\x3c\0\x50\0\0\0\0\0A\0\0\0"), // an ack
        ]
        .concat();
        for chunk_bytes in 1..=20 {
            assert!(verdict(&bytes, chunk_bytes).is_ok(), "{chunk_bytes}");
        }
    }

    #[test]
    fn deep_nesting_is_refused_before_it_reaches_the_parser() {
        for kind in [FRAME_METHOD, FRAME_CONTENT_HEADER] {
            for chunk_bytes in [1, 3, 1000] {
                let of = |levels| [frame(FRAME_HEARTBEAT, b""), frame(kind, &nested(kind, levels))].concat();
                assert!(verdict(&of(LEVELS_MAX), chunk_bytes).is_ok());
                assert!(verdict(&of(LEVELS_MAX + 1), chunk_bytes).is_err());
            }
        }
    }

    #[test]
    fn an_oversized_frame_is_refused_by_its_header() {
        let head = |kind: u8, size: u32| [&[kind, 0, 0][..], &size.to_be_bytes()].concat();
        assert!(verdict(&head(FRAME_METHOD, METHOD_BYTES_MAX + 1), 100).is_err());
        assert!(verdict(&head(FRAME_BODY, FRAME_BYTES_MAX + 1), 100).is_err());
        assert!(verdict(&head(FRAME_BODY, u32::MAX), 1).is_err());
        assert!(verdict(&head(FRAME_BODY, FRAME_BYTES_MAX), 100).is_ok());
    }

    #[test]
    fn the_error_names_a_peer_of_another_protocol() {
        assert!(
            verdict(b"HTTP/1.1 400", 100)
                .unwrap_err()
                .to_string()
                .contains("speaks HTTP")
        );
        assert!(verdict(b"SSH-2.0", 100).unwrap_err().to_string().contains("0x53"));
        assert!(verdict(b"AMQP\0\0\x08\0", 1).unwrap_err().to_string().contains("0-9-1"));
        let alert = b"\x15\x03\x03\0\x02\x02\x46";
        assert!(verdict(alert, 100).unwrap_err().to_string().contains("amqps://"));
    }

    #[test]
    fn only_incoming_bytes_are_recorded() {
        let (ours, mut theirs) = pair();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .unwrap();
        runtime.block_on(async {
            let stream = Socket::Plain(TcpStream::from_std(ours).unwrap());
            let (_wire, mut guarded, _mark) = SocketHandle::new(stream).unwrap();
            let last_bytes = guarded.last_bytes();
            let nothing_yet = last_bytes.at();
            let before = Instant::now();
            theirs.write_all(&frame(FRAME_HEARTBEAT, b"")).unwrap();
            let mut read = async || {
                let mut buf = [0; 100];
                poll_fn(|cx| Pin::new(&mut guarded).poll_read(cx, &mut buf))
                    .await
                    .unwrap()
            };
            assert_eq!(read().await, 8);
            let noted = last_bytes.at();
            assert!(nothing_yet < noted && noted + Duration::from_micros(1) > before && noted <= Instant::now());
            drop(theirs);
            assert_eq!(read().await, 0);
            assert_eq!(last_bytes.at(), noted);
        });
    }

    fn pair() -> (std::net::TcpStream, std::net::TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        ours.set_nonblocking(true).unwrap();
        (ours, listener.accept().unwrap().0)
    }

    proptest! {
        #[test]
        fn the_verdict_does_not_depend_on_the_chunks(bytes in prop::collection::vec(any::<u8>(), 0..200), chunk_bytes in 1usize..50) {
            let framed = frame(FRAME_METHOD, &bytes);
            prop_assert_eq!(verdict(&framed, chunk_bytes).is_ok(), verdict(&framed, usize::MAX).is_ok());
            prop_assert_eq!(verdict(&bytes, chunk_bytes).is_ok(), verdict(&bytes, usize::MAX).is_ok());
        }
    }
}
