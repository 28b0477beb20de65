//! A publisher to the broker in memory, over a network that can be cut, with one fault or none.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use onlyonce::async_trait;
use onlyonce::event::{Headers, Origin, RawEvent};
use onlyonce::publisher::{Message, PublishError, PublishErrorKind, Publisher, PublisherHealth};
use onlyonce::testing::{Broker, BrokerSource};
use onlyonce_conformance::{PublisherCapabilities, PublisherHarness, Result};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

const ADDRESS: &str = "memory";
const UNBOUND: &str = "unbound";
const PASSWORD: &str = "s3cr3t-marker";
const PATIENCE: Duration = Duration::from_millis(500);
/// As a broker takes a moment to answer.
const ROUND_TRIP: Duration = Duration::from_millis(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Network {
    Flowing,
    Cut,
    Frozen,
}

/// What is wrong with a publisher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    ConfirmsBeforeTheBroker,
    LosesOnStop,
    DropsThoseWhoWaitAtStop,
    PublishesAfterStop,
    NamesEventsAnew,
    LetsHeadersWin,
    DropsReplays,
    MakesNullEmpty,
    MakesBodiesText,
    LosesHeaders,
    ConfirmsTheMissing,
    ConfirmsTheUnroutable,
    BlamesTheMessage,
    LosesUnderLoad,
    RefusesUnderLoad,
    OneBadCostsAll,
    ConfirmsWhileAway,
    NeverRecovers,
    HidesOutages,
    HangsInSilence,
    TellsSecrets,
    NamesAnotherSystem,
}

pub(crate) struct MemoryPublisher {
    broker: Broker,
    network: watch::Receiver<Network>,
    fault: Fault,
    under_way: AtomicUsize,
    /// Somebody was answered.
    answered: Notify,
    stopped: AtomicBool,
    away: AtomicBool,
    poisoned: AtomicBool,
    seen: Mutex<HashSet<String>>,
    buffer: Arc<Mutex<Vec<RawEvent>>>,
}

impl MemoryPublisher {
    async fn send(&self, message: &Message) -> std::result::Result<(), PublishError> {
        use PublishErrorKind::{Destination, Interrupted, Invalid, Refused, Unavailable};
        let fail = |kind, why: &str| Err(PublishError::new(kind, why));
        let fault = self.fault;
        if self.stopped.load(Ordering::SeqCst) && fault != Fault::PublishesAfterStop {
            return fail(Unavailable, "stopped");
        }
        let crowd = self.under_way.load(Ordering::SeqCst) > 256;
        if crowd && fault == Fault::RefusesUnderLoad {
            return fail(Unavailable, "too many at once");
        }
        sleep(ROUND_TRIP).await;
        let network = *self.network.borrow();
        match network {
            Network::Flowing => {}
            Network::Cut if fault == Fault::ConfirmsWhileAway => return Ok(()),
            Network::Cut => return fail(Unavailable, "the broker in memory is away"),
            Network::Frozen if fault == Fault::HangsInSilence => std::future::pending().await,
            Network::Frozen => {
                sleep(PATIENCE).await;
                return fail(Unavailable, "no answer");
            }
        }
        if fault == Fault::NeverRecovers && self.away.load(Ordering::SeqCst) {
            return fail(Unavailable, "still away");
        }
        if fault == Fault::DropsThoseWhoWaitAtStop && self.stopped.load(Ordering::SeqCst) {
            return fail(Interrupted, "stopped");
        }
        match message.address.as_str() {
            ADDRESS => {}
            UNBOUND if fault == Fault::ConfirmsTheUnroutable => return Ok(()),
            UNBOUND => return fail(Refused, "unroutable"),
            _ => {
                self.poisoned.store(true, Ordering::SeqCst);
                return match fault {
                    Fault::ConfirmsTheMissing => Ok(()),
                    Fault::BlamesTheMessage => fail(Invalid, "no such destination"),
                    _ => fail(Destination, "no such destination"),
                };
            }
        }
        if fault == Fault::OneBadCostsAll && self.poisoned.load(Ordering::SeqCst) {
            return fail(Interrupted, "the channel died");
        }
        if crowd && fault == Fault::LosesUnderLoad {
            return Ok(());
        }
        let repeated = !self
            .seen
            .lock()
            .expect("no panic")
            .insert(message.event_id.clone());
        if repeated && fault == Fault::DropsReplays {
            return Ok(());
        }
        let event = self.event(message);
        match fault {
            Fault::ConfirmsBeforeTheBroker => {
                let broker = self.broker.clone();
                tokio::spawn(async move {
                    sleep(Duration::from_millis(100)).await;
                    broker.publish(event);
                });
            }
            Fault::LosesOnStop => self.buffer.lock().expect("no panic").push(event),
            _ => self.broker.publish(event),
        }
        Ok(())
    }

    /// As it arrives.
    fn event(&self, message: &Message) -> RawEvent {
        let mut encoded = message.encode("ce_");
        match self.fault {
            Fault::NamesEventsAnew => {
                encoded
                    .headers
                    .push("onlyonce-event-id", format!("{:p}", &encoded));
            }
            Fault::LetsHeadersWin => {
                for (name, value) in message.headers.iter() {
                    encoded.headers.push(name, value.unwrap_or_default());
                }
            }
            Fault::LosesHeaders => {
                let kept = encoded.headers.iter().filter(|(name, _)| *name != "conf-twice");
                encoded.headers = kept
                    .map(|(name, value)| (name.to_owned(), value.unwrap_or_default()))
                    .collect::<Headers>();
            }
            Fault::MakesNullEmpty => {
                encoded.body.get_or_insert_default();
            }
            Fault::MakesBodiesText => {
                let text = encoded
                    .body
                    .map(|body| String::from_utf8_lossy(&body).into_owned());
                encoded.body = text.map(Into::into);
            }
            _ => {}
        }
        if let Some(media_type) = encoded.content_type {
            encoded.headers.push("content-type", media_type);
        }
        RawEvent {
            event_type: message.event_type.clone().map(Into::into),
            key: message.key.clone(),
            payload: encoded.body,
            headers: encoded.headers,
            origin: Origin {
                system: "memory",
                destination: ADDRESS.into(),
                detail: "".into(),
            },
            ..RawEvent::default()
        }
    }
}

#[async_trait]
impl Publisher for MemoryPublisher {
    fn system(&self) -> &'static str {
        match self.fault {
            Fault::NamesAnotherSystem => "memoria",
            _ => "memory",
        }
    }

    async fn publish(&self, message: &Message) -> std::result::Result<(), PublishError> {
        self.under_way.fetch_add(1, Ordering::SeqCst);
        let told = self.send(message).await;
        self.under_way.fetch_sub(1, Ordering::SeqCst);
        self.answered.notify_waiters();
        let unavailable = told
            .as_ref()
            .is_err_and(|e| e.kind() == PublishErrorKind::Unavailable);
        self.away.store(unavailable, Ordering::SeqCst);
        told
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn health(&self) -> PublisherHealth {
        if self.away.load(Ordering::SeqCst) && self.fault != Fault::HidesOutages {
            PublisherHealth::down("the broker in memory is away")
        } else {
            PublisherHealth::up()
        }
    }

    async fn stop(&self) {
        if self.fault == Fault::DropsThoseWhoWaitAtStop {
            self.stopped.store(true, Ordering::SeqCst);
        }
        let all_answered = async {
            while self.under_way.load(Ordering::SeqCst) > 0 {
                let answered = self.answered.notified();
                tokio::select! { () = answered => {}, () = sleep(ROUND_TRIP) => {} }
            }
        };
        let _ = timeout(PATIENCE, all_answered).await;
        self.buffer.lock().expect("no panic").clear();
        self.stopped.store(true, Ordering::SeqCst);
    }
}

impl fmt::Debug for MemoryPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            Fault::TellsSecrets => write!(f, "MemoryPublisher({PASSWORD})"),
            _ => f.debug_struct("MemoryPublisher").finish_non_exhaustive(),
        }
    }
}

/// The broker in memory behind its network.
pub(crate) struct MemoryDestination {
    broker: Broker,
    network: watch::Sender<Network>,
    fault: Fault,
}

impl MemoryDestination {
    pub(crate) fn with(fault: Fault) -> Self {
        Self {
            broker: Broker::new(),
            network: watch::Sender::new(Network::Flowing),
            fault,
        }
    }
}

#[async_trait]
impl PublisherHarness for MemoryDestination {
    type Publisher = MemoryPublisher;
    type Source = BrokerSource;

    async fn empty() -> Result<Option<Self>> {
        Ok(Some(Self::with(Fault::None)))
    }

    fn system(&self) -> &'static str {
        "memory"
    }

    fn capabilities(&self) -> PublisherCapabilities {
        let mut can = PublisherCapabilities::default();
        can.patience = Duration::from_secs(3);
        can.outages = true;
        can
    }

    fn publisher(&self) -> MemoryPublisher {
        MemoryPublisher {
            broker: self.broker.clone(),
            network: self.network.subscribe(),
            fault: self.fault,
            under_way: AtomicUsize::new(0),
            answered: Notify::new(),
            stopped: AtomicBool::new(false),
            away: AtomicBool::new(false),
            poisoned: AtomicBool::new(false),
            seen: Mutex::default(),
            buffer: Arc::default(),
        }
    }

    fn source(&self) -> BrokerSource {
        self.broker.source()
    }

    fn address(&self) -> String {
        ADDRESS.to_owned()
    }

    fn missing(&self) -> String {
        "nowhere".to_owned()
    }

    fn unroutable(&self) -> Option<String> {
        Some(UNBOUND.to_owned())
    }

    async fn cut(&self) -> Result {
        self.network.send_replace(Network::Cut);
        Ok(())
    }

    async fn freeze(&self) -> Result {
        self.network.send_replace(Network::Frozen);
        Ok(())
    }

    async fn mend(&self) -> Result {
        self.network.send_replace(Network::Flowing);
        Ok(())
    }

    fn secrets(&self) -> Vec<String> {
        vec![PASSWORD.to_owned()]
    }
}
