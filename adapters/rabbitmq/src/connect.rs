//! One connection with one channel: how it is opened, how it is cut, and what the broker's refusals mean.

use std::net::Shutdown;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lapin::options::QueueDeclareOptions;
use lapin::tcp::{AMQPUriTcpExt, OwnedTLSConfig};
use lapin::types::FieldTable;
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{AsyncTcpStream, Channel, Connection, ConnectionProperties, Error, ErrorKind};
use onlyonce::source::SourceError;
use socket2::{SockRef, Socket};

use crate::config::{Access, Settings};
use crate::quiet;

/// An open channel on a connection of its own. Dropping it cuts the connection, and the broker then
/// requeues whatever was unacknowledged.
#[derive(Debug)]
pub(crate) struct Link {
    /// For the consumer and its settlements.
    pub(crate) channel: Channel,
    /// For questions about the queue: if it is gone the broker closes the channel that asks, and that
    /// must not be the one that holds our deliveries.
    pub(crate) watching: Channel,
    pub(crate) connection: Connection,
    /// How many messages waited at the start.
    pub(crate) waiting: u32,
    // Fields drop in this order: lapin gets to queue its polite close, then the socket goes.
    _cut: CutOnDrop,
}

impl Link {
    /// Connects, opens the channels, and makes sure that the queue is there.
    pub(crate) async fn open(settings: &Settings, name: &str) -> Result<Self, SourceError> {
        let (connection, cut) = dial(&settings.access, name).await?;
        let channels = async {
            Ok((
                connection.create_channel().await?,
                connection.create_channel().await?,
            ))
        };
        let (channel, watching) = within(&settings.access, "did not answer", channels)
            .await?
            .map_err(|e: Error| explain(settings, "open a channel", &e))?;
        let waiting = look(settings, &watching).await?;
        Ok(Self {
            channel,
            watching,
            connection,
            waiting,
            _cut: cut,
        })
    }

    /// Whether lapin still takes both for open.
    pub(crate) fn is_up(&self) -> bool {
        self.channel.status().connected() && self.connection.status().connected()
    }
}

/// Asks for the queue and returns how many messages wait in it.
///
/// The declaration is passive: it looks and never creates. A queue that a consumer creates by
/// mistake, with other arguments or in the wrong vhost, would silently receive nothing.
pub(crate) async fn look(settings: &Settings, channel: &Channel) -> Result<u32, SourceError> {
    let passive = QueueDeclareOptions {
        passive: true,
        ..Default::default()
    };
    let looking = channel.queue_declare(settings.queue.as_str().into(), passive, FieldTable::default());
    let queue = within(&settings.access, "did not answer", looking)
        .await?
        .map_err(|e| explain(settings, "look at the queue", &e))?;
    Ok(queue.message_count())
}

/// Opens a connection of this name. What is dropped to cut it is dropped after it: lapin gets to queue its polite
/// close, then the socket goes.
pub(crate) async fn dial(access: &Access, name: &str) -> Result<(Connection, CutOnDrop), SourceError> {
    let wire = Wire::default();
    let cut = CutOnDrop(wire.clone());
    let connecting = connect(access, name, wire);
    let connection = within(access, "did not finish the handshake", connecting).await??;
    Ok((connection, cut))
}

async fn connect(access: &Access, name: &str, wire: Wire) -> Result<Connection, SourceError> {
    let tls = OwnedTLSConfig {
        identity: None,
        cert_chain: access.tls_ca.clone(),
    };
    let timeout = access.connect_timeout;
    let observer = quiet::observer();
    let runtime = lapin::runtime::default_runtime().map_err(|e| explain_login(access, &e))?;
    let reactor = runtime.clone();
    let open_socket = async move |uri: AMQPUri, _| {
        // This runs on the thread that will write the login, and lapin logs every frame at TRACE.
        quiet::on_this_thread(&observer);
        let plain = AMQPUri {
            scheme: AMQPScheme::AMQP,
            ..uri.clone()
        };
        let opening = async {
            let stream = plain.connect_with_config_async(tls.as_ref(), &reactor).await?;
            if let AsyncTcpStream::Plain(socket) = &stream {
                wire.connected(SockRef::from(socket.get_ref()).try_clone()?)?;
            }
            match uri.scheme {
                AMQPScheme::AMQP => Ok(stream),
                AMQPScheme::AMQPS => stream.into_tls(&uri.authority.host, tls.as_ref()).await,
            }
        };
        let stream = tokio::time::timeout(timeout, opening)
            .await
            .map_err(std::io::Error::from)??;
        Ok(stream)
    };
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    // No automatic recovery: it restores connections but not channels, and leaves consumers that
    // wait for ever. What ends here is opened anew from outside.
    Connection::connector(access.broker.uri.clone(), runtime, open_socket, properties)
        .await
        .map_err(|e| explain_login(access, &e))
}

/// A second handle on the connection's socket, to cut it from outside.
///
/// lapin runs each connection on a thread of its own, and that thread knows no timeout before the
/// handshake is over and no heartbeat after a close was asked for. Against a peer that accepts and
/// then says nothing, every attempt would leave a thread and a socket behind.
#[derive(Debug, Clone, Default)]
struct Wire(Arc<Mutex<WireState>>);

#[derive(Debug, Default)]
enum WireState {
    #[default]
    Unconnected,
    Connected(Socket),
    Cut,
}

impl Wire {
    fn connected(&self, socket: Socket) -> std::io::Result<()> {
        let mut state = self.lock();
        if matches!(*state, WireState::Cut) {
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        *state = WireState::Connected(socket);
        Ok(())
    }

    fn cut(&self) {
        if let WireState::Connected(socket) = std::mem::replace(&mut *self.lock(), WireState::Cut) {
            // It fails if the connection is closed already, which is just as well.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn lock(&self) -> MutexGuard<'_, WireState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cuts the wire when it is dropped, whatever its owner was waiting for.
#[derive(Debug)]
pub(crate) struct CutOnDrop(Wire);

impl Drop for CutOnDrop {
    fn drop(&mut self) {
        self.0.cut();
    }
}

/// Bounds one exchange with the broker.
pub(crate) async fn within<T>(
    access: &Access,
    missing: &str,
    exchange: impl Future<Output = T>,
) -> Result<T, SourceError> {
    tokio::time::timeout(access.connect_timeout, exchange)
        .await
        .map_err(|_| {
            let (host, timeout) = (access.broker.host(), access.connect_timeout);
            SourceError::broken(format_args!("RabbitMQ at {host} {missing} within {timeout:?}"))
        })
}

/// What an error of lapin means for whoever runs this: what failed, why, and what to do about it if a
/// person has to. `doing` completes "cannot ..".
pub(crate) fn explain(settings: &Settings, doing: &str, error: &Error) -> SourceError {
    explained(&settings.access, doing, error, |code, text| {
        remedy(settings, code, text)
    })
}

/// The same for an attempt to log in, which is about no queue.
fn explain_login(access: &Access, error: &Error) -> SourceError {
    explained(access, "log in", error, |code, text| {
        login_remedy(access, code, text)
    })
}

fn explained(
    access: &Access,
    doing: &str,
    error: &Error,
    remedy: impl FnOnce(u16, &str) -> Option<String>,
) -> SourceError {
    let host = access.broker.host();
    match error.kind() {
        ErrorKind::ProtocolError(refusal) => {
            let (code, text) = (refusal.get_id(), refusal.get_message().as_str());
            match remedy(code, text) {
                Some(remedy) => SourceError::fatal(format_args!(
                    "cannot {doing} on RabbitMQ at {host}: {text} ({remedy})"
                )),
                None => SourceError::broken(format_args!("cannot {doing} on RabbitMQ at {host}: {text}")),
            }
        }
        ErrorKind::MissingHeartbeatError => {
            SourceError::broken(format_args!("RabbitMQ at {host} is silent: no heartbeat"))
        }
        _ => SourceError::broken(format_args!("cannot {doing} on RabbitMQ at {host}: {error}")),
    }
}

/// What a person has to change, if the broker's refusal will not go away by itself.
fn remedy(settings: &Settings, code: u16, text: &str) -> Option<String> {
    let (queue, user, vhost) = (
        &settings.queue,
        settings.access.broker.user(),
        settings.access.broker.vhost(),
    );
    let has = |part: &str| text.contains(part);
    match code {
        404 if is_away(text) => None,
        403 if has("exclusive") => None,
        403 if !is_login(text) => Some(format!(
            "give the user {user:?} the right to read: rabbitmqctl set_permissions --vhost {vhost:?} {user:?} '' '' '^{queue}$'"
        )),
        404 => Some(format!(
            "declare the queue {queue:?} in vhost {vhost:?}, or correct the name"
        )),
        405 => Some(format!(
            "the queue {queue:?} is exclusive to another connection; use one that is not"
        )),
        406 if has("rabbit_stream_queue") => Some(format!(
            "{queue:?} is a stream, which keeps what was acked and cannot take back what was not; use a quorum or classic queue"
        )),
        _ => login_remedy(&settings.access, code, text),
    }
}

fn login_remedy(access: &Access, code: u16, text: &str) -> Option<String> {
    let (user, vhost) = (access.broker.user(), access.broker.vhost());
    let has = |part: &str| text.contains(part);
    match code {
        530 if is_away(text) => None,
        // Connections of a process that died still count for a while.
        530 if has("limit") => None,
        403 if is_login(text) => Some(format!(
            "check the user {user:?} and the password in the URL; the broker's log names the cause, and `guest` may log in \
             from the broker's own machine only"
        )),
        530 if has("not found") => Some(format!(
            "create the vhost {vhost:?} or correct the URL: a path of `/` is the vhost with an empty name, `/%2f` or no path is the usual \"/\""
        )),
        530 => Some(format!("give the user {user:?} access to the vhost {vhost:?}")),
        _ => None,
    }
}

/// The node that holds the queue or the vhost is away, or busy; it comes back.
pub(crate) fn is_away(text: &str) -> bool {
    ["is down", "is stopped", "timeout"]
        .iter()
        .any(|how| text.contains(how))
}

fn is_login(text: &str) -> bool {
    text.contains("Login was refused") || text.contains("login refused")
}
