use onlyonce::store::SqliteStore;
use onlyonce::{Bytes, Consumer, Context, Event, Handler, HandlerError, async_trait};

struct ForPostgres;

#[async_trait]
impl Handler<sqlx::Postgres> for ForPostgres {
    type Payload = Bytes;

    async fn handle(
        &self,
        _cx: &mut Context<'_, sqlx::Postgres>,
        _event: Event<Bytes>,
    ) -> Result<(), HandlerError> {
        Ok(())
    }
}

fn on_sqlite(store: SqliteStore) {
    let _ = Consumer::builder("c", store).handler(ForPostgres);
}

fn main() {}
