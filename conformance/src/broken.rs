use std::error::Error;
use std::fmt;
use std::time::Duration;

/// What a promise, and what a harness needs for it, comes to.
pub type Result<T = ()> = std::result::Result<T, Broken>;

/// No promise takes longer; one that waits for ever is broken as well.
const LIMIT: Duration = Duration::from_secs(300);

/// A promise that was not kept, or that could not be put to the test.
///
/// Every error becomes one by `?`, so that a harness can be written without ceremony; that is why
/// it is not an `Error` itself.
pub struct Broken {
    promise: &'static str,
    what: String,
}

impl Broken {
    /// Not kept, because of this.
    pub fn new(what: impl Into<String>) -> Self {
        Self {
            promise: "",
            what: what.into(),
        }
    }

    /// Which promise it was.
    pub fn promise(&self) -> &'static str {
        self.promise
    }
}

impl<E: Error> From<E> for Broken {
    fn from(error: E) -> Self {
        let mut what = error.to_string();
        let mut next = error.source();
        while let Some(source) = next {
            let text = source.to_string();
            if !what.contains(&text) {
                what.push_str(&format!(": {text}"));
            }
            next = source.source();
        }
        Self::new(what)
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is not kept: {}", self.promise, self.what)
    }
}

impl fmt::Debug for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Puts the promise's name to what broke it.
pub(crate) async fn promise(name: &'static str, kept: impl Future<Output = Result>) -> Result {
    let result = tokio::time::timeout(LIMIT, kept).await;
    result
        .unwrap_or_else(|_| Err(Broken::new(format!("still undecided after {LIMIT:?}"))))
        .map_err(|broken| Broken {
            promise: name,
            ..broken
        })
}

/// Ends a promise that this source or broker does not give.
#[allow(clippy::print_stdout)] // read beside the names of the tests
pub(crate) fn not_promised(why: &str) -> Result {
    println!("not promised: {why}");
    Ok(())
}

/// Breaks the promise unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::Broken::new(format!($($message)+)));
        }
    };
}
pub(crate) use ensure;
