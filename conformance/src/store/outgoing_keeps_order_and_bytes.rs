use onlyonce::event::Headers;
use onlyonce::publisher::{CloudEventsMode, Message};
use onlyonce::store::OutgoingRow;

use super::StoreHarness;
use super::bench::Bench;
use super::outgoing_bench::{RELAY, ids, rows};
use crate::Result;
use crate::broken::{ensure, promise};

/// Rows of one statement get ascending ids in the order given, and later transactions later ones; each is read as the
/// event that was written, byte for byte.
pub async fn outgoing_keeps_order_and_bytes<H: StoreHarness>(harness: &H) -> Result {
    promise("outgoing_keeps_order_and_bytes", async {
        let bench = Bench::new(harness).await?;
        bench.write(&rows(&["z-1", "a-2", "m", "z-3", "b-4"])?).await?;
        bench.write(&rows(&["a-5", "0"])?).await?;
        let due = bench.due(|_| {}).await?;
        let order = ids(&due);
        ensure!(
            order == ["z-1", "a-2", "m", "z-3", "b-4", "a-5", "0"],
            "rows were written in another order than that of their ids: {order:?}"
        );
        ensure!(
            due.windows(2).all(|two| two[0].id < two[1].id),
            "ids do not ascend"
        );
        let mut of_key = due.iter().filter(|row| row.message.event_id.starts_with("z-"));
        ensure!(
            of_key.all(|row| row.lane == due[0].lane && row.order == due[0].order),
            "rows of one key are in different lanes, or ordered apart"
        );
        bench.sql("DELETE FROM {outbox}").await?;

        let mut headers = Headers::new();
        headers.push("twice", "first");
        headers.push("twice", vec![0xff, 0]);
        headers.push_null("none");
        let mut message = Message::new("an/address:1", "shop", "é-1", vec![0, 0xff]);
        message.event_type = Some("paid".to_owned());
        message.key = Some(vec![0xfe, 0].into());
        message.content_type = Some("application/octet-stream".to_owned());
        message.headers = headers;
        message.attributes = vec![("subject".to_owned(), "é".to_owned())];
        message.mode = CloudEventsMode::Structured;
        let mut tombstone = message.clone();
        tombstone.payload = None;
        let mut empty = message.clone();
        empty.payload = Some(Vec::new().into());
        empty.key = None;
        let written = [message, tombstone, empty];
        let row = |message: &Message| {
            Ok(OutgoingRow::new(
                RELAY,
                "memory:an/address:1".parse()?,
                message.clone(),
            ))
        };
        bench
            .write(&written.iter().map(row).collect::<Result<Vec<_>>>()?)
            .await?;
        let due = bench.due(|_| {}).await?;
        let shape = |m: &Message| {
            let headers: Vec<_> = m
                .headers
                .iter()
                .map(|(n, v)| (n.to_owned(), v.map(<[u8]>::to_vec)))
                .collect();
            let texts = [
                Some(&m.event_id),
                Some(&m.source),
                Some(&m.address),
                m.event_type.as_ref(),
                m.content_type.as_ref(),
            ];
            let texts = texts.map(|text| text.cloned());
            (
                texts,
                m.key.clone(),
                m.payload.clone(),
                headers,
                m.attributes.clone(),
                m.mode,
                m.replays,
            )
        };
        for (written, read) in written.iter().zip(&due) {
            let (written, read) = (shape(written), shape(&read.message));
            ensure!(written == read, "{written:?} was written and {read:?} read");
        }
        ensure!(due.len() == 3, "3 rows were written and {} read", due.len());
        Ok(())
    })
    .await
}
