// Delays, receives, schedules and cancels messages on the RabbitMQ of BIDE_URL. Without arguments it lists the commands.

package main

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	timeout          = 5 * time.Minute
	repeatAfter      = 2 * time.Second
	reservationBytes = 64_000
	recordOverhead   = 250
	replyTo          = "amq.rabbitmq.reply-to"
)

type command struct {
	name, parameters string
	run              func(arguments []string) error
}

var commands = []command{
	{"vectors", "FILE", func(arguments []string) error {
		count, err := checkVectors(arguments[0])
		if err == nil {
			fmt.Printf("%d vectors are right\n", count)
		}
		return err
	}},
	{"delay", "TARGET MILLISECONDS BODY", connected(delay)},
	{"receive", "QUEUE COUNT", connected(receive)},
	{"retry", "QUEUE MILLISECONDS", connected(retry)},
	{"schedule", "KEY TARGET MILLISECONDS BODY", connected(schedule)},
	{"scheduled", "KEY", connected(scheduled)},
	{"cancel", "KEY", connected(cancel)},
}

func main() {
	for _, one := range commands {
		if len(os.Args) > 1 && os.Args[1] == one.name && len(os.Args)-2 == len(strings.Fields(one.parameters)) {
			if err := one.run(os.Args[2:]); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			return
		}
	}
	for _, one := range commands {
		fmt.Fprintln(os.Stderr, os.Args[0], one.name, one.parameters)
	}
	os.Exit(2)
}

func connected(run func(*amqp.Connection, []string) error) func([]string) error {
	return func(arguments []string) error {
		url := os.Getenv("BIDE_URL")
		if url == "" {
			url = "amqp://localhost"
		}
		connection, err := amqp.Dial(url)
		if err != nil {
			return err
		}
		defer connection.Close()
		return run(connection, arguments)
	}
}

func now() int64 {
	return time.Now().UnixMilli()
}

// -- delayed messages

// The target is JSON: {"queue": "orders"} or {"exchange": "shop", "routing_key": "order.created"}.
func delay(connection *amqp.Connection, arguments []string) error {
	var given message
	if err := json.Unmarshal([]byte(arguments[0]), &given.Target); err != nil {
		return err
	}
	var err error
	if given.Delay, err = strconv.ParseInt(arguments[1], 10, 64); err != nil {
		return err
	}
	channel, err := openConfirming(connection)
	if err != nil {
		return err
	}
	due, err := channel.publishDelayed(given, amqp.Publishing{Body: []byte(arguments[2])})
	if err == nil {
		fmt.Println("due", due)
	}
	return err
}

type confirmingChannel struct {
	*amqp.Channel
	release  string
	confirms chan amqp.Confirmation
	returned chan amqp.Return
	closed   chan *amqp.Error
}

func openConfirming(connection *amqp.Connection) (*confirmingChannel, error) {
	channel, err := connection.Channel()
	if err != nil {
		return nil, err
	}
	release, _ := connection.Properties["version"].(string)
	return &confirmingChannel{
		Channel: channel,
		release: release,
		// With room for the confirms of repeated messages that come too late: a full one would block the connection.
		confirms: channel.NotifyPublish(make(chan amqp.Confirmation, timeout/repeatAfter)),
		returned: channel.NotifyReturn(make(chan amqp.Return, 1)),
		closed:   channel.NotifyClose(make(chan *amqp.Error, 1)),
	}, channel.Confirm(false)
}

// publishDelayed publishes a message with the headers, priority and expiration of the first argument, and the body and the
// other properties of the second.
func (c *confirmingChannel) publishDelayed(given message, publishing amqp.Publishing) (int64, error) {
	// This exchange exists if 'bide delay apply' was run: without it, digit queues may be missing.
	if err := c.ExchangeDeclarePassive(base+".complete", "fanout", true, false, false, false, nil); err != nil {
		return 0, err
	}
	given.Now, given.Release = now(), c.release
	made, err := delayed(given)
	if err != nil {
		return 0, err
	}
	for _, one := range made.Declare.Queues {
		if _, err := c.QueueDeclare(one.Name, true, false, false, false, one.Arguments); err != nil {
			return 0, err
		}
	}
	for _, one := range made.Declare.Bindings {
		bind := c.ExchangeBind
		if one.DestinationType == "queue" {
			bind = c.QueueBind
		}
		if err := bind(one.Destination, one.RoutingKey, one.Source, false, nil); err != nil {
			return 0, err
		}
	}
	given.Now = now() // the delay begins now
	if made, err = delayed(given); err != nil {
		return 0, err
	}
	sent := made.Publish.Properties
	publishing.Headers, publishing.Expiration, publishing.DeliveryMode = sent.Headers, sent.Expiration, amqp.Persistent
	if publishing.MessageId == "" {
		publishing.MessageId = newId()
	}
	if sent.Priority != nil {
		publishing.Priority = *sent.Priority
	}
	return given.Now + given.Delay, c.publishConfirmed(made.Publish.Exchange, made.Publish.RoutingKey, publishing, timeout)
}

var errNotConfirmed = errors.New("the broker has not confirmed the message")

// publishConfirmed publishes a message and waits until the broker has it. A message without a queue is an error.
//
// It does not use PublishWithDeferredConfirm, which before release 1.8.0 misses a confirm that comes at once
// (rabbitmq/amqp091-go, issue 182).
func (c *confirmingChannel) publishConfirmed(
	exchange, routingKey string, publishing amqp.Publishing, limit time.Duration,
) error {
	number := c.GetNextPublishSeqNo()
	if err := c.Publish(exchange, routingKey, true, false, publishing); err != nil {
		return err
	}
	confirm, isOpen := amqp.Confirmation{}, true
	for late := time.After(limit); isOpen && confirm.DeliveryTag < number; {
		select {
		case confirm, isOpen = <-c.confirms:
		case <-late:
			return errNotConfirmed
		}
	}
	if !isOpen {
		return fmt.Errorf("the broker closed the channel: %v", <-c.closed)
	}
	if !confirm.Ack {
		return fmt.Errorf("the broker refused the message for %s %s", exchange, routingKey)
	}
	select {
	case <-c.returned: // the broker returns a message before it confirms it
		return fmt.Errorf("no queue takes messages for %s %s", exchange, routingKey)
	default:
		return nil
	}
}

func newId() string {
	random := make([]byte, 10)
	if _, err := rand.Read(random); err != nil {
		panic(err)
	}
	return hex.EncodeToString(random)
}

// -- received messages

func receive(connection *amqp.Connection, arguments []string) error {
	count, err := strconv.Atoi(arguments[1])
	if err != nil {
		return err
	}
	channel, err := connection.Channel()
	if err != nil {
		return err
	}
	deliveries, err := consume(channel, arguments[0], count)
	if err != nil {
		return err
	}
	for ; count > 0; count-- {
		delivery, isOpen := <-deliveries
		if !isOpen {
			return fmt.Errorf("the broker closed the channel, or the queue was deleted")
		}
		due, key := waitOf(delivery.Headers)
		shown := table{
			"body": string(delivery.Body), "due": due, "key": key, "received": now(), "headers": copyOf(delivery.Headers),
		}
		text, err := json.Marshal(shown)
		if err != nil {
			return err
		}
		fmt.Println(string(text))
		if err := delivery.Ack(false); err != nil {
			return err
		}
	}
	return channel.Close()
}

// retry delays a copy of a message, and acknowledges the message when the broker has the copy.
func retry(connection *amqp.Connection, arguments []string) error {
	milliseconds, err := strconv.ParseInt(arguments[1], 10, 64)
	if err != nil {
		return err
	}
	channel, err := openConfirming(connection)
	if err != nil {
		return err
	}
	deliveries, err := consume(channel.Channel, arguments[0], 1)
	if err != nil {
		return err
	}
	delivery, isOpen := <-deliveries
	if !isOpen {
		return fmt.Errorf("the broker closed the channel, or the queue was deleted")
	}
	copied := message{Target: target{Queue: &arguments[0]}, Delay: milliseconds}
	copied.Properties.Headers = copyOf(delivery.Headers)
	copied.Properties.Expiration, copied.Properties.Priority = expirationOf(delivery), priorityOf(delivery)
	// Without the user id: the broker refuses the name of another user.
	others := amqp.Publishing{
		ContentType: delivery.ContentType, ContentEncoding: delivery.ContentEncoding, CorrelationId: delivery.CorrelationId,
		ReplyTo: delivery.ReplyTo, MessageId: delivery.MessageId, Timestamp: delivery.Timestamp, Type: delivery.Type,
		AppId: delivery.AppId, Body: delivery.Body,
	}
	if _, err := channel.publishDelayed(copied, others); err != nil {
		return err
	}
	if err := delivery.Ack(false); err != nil {
		return err
	}
	return channel.Close()
}

// expirationOf returns the header bide-expiration, which a delayed message has instead of the property.
func expirationOf(delivery amqp.Delivery) string {
	if expiration, isThere := delivery.Headers["bide-expiration"].(string); isThere {
		return expiration
	}
	return delivery.Expiration
}

// priorityOf returns the header bide-priority, which a delayed message has instead of the property. Clients write a small
// whole number in the type of their choice.
func priorityOf(delivery amqp.Delivery) *uint8 {
	priority, err := strconv.ParseUint(fmt.Sprint(delivery.Headers["bide-priority"]), 10, 8)
	if err != nil {
		priority = uint64(delivery.Priority)
	}
	if priority == 0 {
		return nil
	}
	small := uint8(priority)
	return &small
}

func consume(channel *amqp.Channel, queue string, prefetch int) (<-chan amqp.Delivery, error) {
	if err := channel.Qos(prefetch, 0, false); err != nil {
		return nil, err
	}
	return channel.Consume(queue, "", false, false, false, false, nil)
}

// -- schedules

func schedule(connection *amqp.Connection, arguments []string) error {
	given := operation{Kind: "schedule", Key: &arguments[0]}
	if err := json.Unmarshal([]byte(arguments[1]), &given.Target); err != nil {
		return err
	}
	milliseconds, err := strconv.ParseInt(arguments[2], 10, 64)
	if err != nil {
		return err
	}
	due := now() + milliseconds
	given.Due = &due
	given.Message = &scheduledMessage{
		Properties: table{"delivery_mode": int64(2), "message_id": newId(), "headers": table{"bide-sent": now()}},
		Body:       []byte(arguments[3]),
	}
	version, _, err := newLog(connection).append(given, false)
	if err == nil {
		fmt.Println("scheduled, version", version)
	}
	return err
}

func cancel(connection *amqp.Connection, arguments []string) error {
	_, answer, err := newLog(connection).append(operation{Kind: "cancel", Key: &arguments[0]}, true)
	if err == nil {
		fmt.Println(answer.Outcome)
	}
	return err
}

func scheduled(connection *amqp.Connection, arguments []string) error {
	found, err := newLog(connection).ask(arguments[0])
	if err != nil {
		return err
	}
	text, err := json.Marshal(found)
	if err == nil {
		fmt.Println(string(text))
	}
	return err
}

// scheduleLog appends operations to the schedule log, and asks what waits.
type scheduleLog struct {
	connection *amqp.Connection
	others     *answeredChannel // for reservations and questions
	partitions map[int]*partition
}

// answeredChannel receives the answers to what is published on it.
type answeredChannel struct {
	*confirmingChannel
	answers <-chan amqp.Delivery
}

// partition has a channel on which nothing else is published.
type partition struct {
	channel      *answeredChannel
	session      string
	number, room int
}

type answer struct {
	V       int    `json:"v"`
	Outcome string `json:"outcome"`
	Version string `json:"version"`
}

func newLog(connection *amqp.Connection) *scheduleLog {
	return &scheduleLog{connection: connection, partitions: map[int]*partition{}}
}

// append appends an operation on a key, and repeats it until it is confirmed, or answered if it needs an answer. Gates
// apply a repeated request once. It returns the id of the request, which is the version of an unconditional schedule.
func (l *scheduleLog) append(given operation, needsAnswer bool) (string, answer, error) {
	part, err := l.partition(partitionOf(*given.Key))
	if err != nil {
		return "", answer{}, err
	}
	part.number++
	given.Request = fmt.Sprintf("%s-%d", part.session, part.number)
	keys, body, err := recordOf(given, now())
	if err != nil {
		return "", answer{}, err
	}
	publishing := amqp.Publishing{
		DeliveryMode: amqp.Persistent, MessageId: given.Request, CorrelationId: given.Request,
		ReplyTo: replyTo, Body: body,
	}
	reason := errNotConfirmed
	for until := time.Now().Add(timeout); time.Now().Before(until); {
		if err := l.takeRoom(part, keys[0], len(body)); err != nil {
			return "", answer{}, err
		}
		err := part.channel.publishConfirmed(base+".schedule", keys[0], publishing, repeatAfter)
		if errors.Is(err, errNotConfirmed) {
			continue
		}
		if err != nil || !needsAnswer {
			return given.Request, answer{}, err
		}
		reason = errors.New("the operation is recorded, and no gate answered")
		if found, isThere := part.channel.answerTo(given.Request); isThere {
			var decoded answer
			if err := json.Unmarshal(found, &decoded); err != nil {
				return "", answer{}, err
			}
			if decoded.V != 1 {
				return "", answer{}, fmt.Errorf("the version %d of an answer is unknown", decoded.V)
			}
			return given.Request, decoded, nil
		}
	}
	return "", answer{}, reason
}

func (c *answeredChannel) answerTo(request string) ([]byte, bool) {
	late := time.After(repeatAfter)
	for {
		select {
		case delivery, isOpen := <-c.answers:
			if isOpen && delivery.CorrelationId != request {
				continue // of an earlier request
			}
			return delivery.Body, isOpen
		case <-late:
			// The gate that should have answered may be gone: any other gives the same answer.
			return nil, false
		}
	}
}

// ask returns what waits under a key. The leading gate answers.
func (l *scheduleLog) ask(key string) (scheduleState, error) {
	channel, err := l.otherChannel()
	if err != nil {
		return scheduleState{}, err
	}
	routingKey, body, err := questionOf(key)
	if err != nil {
		return scheduleState{}, err
	}
	for until := time.Now().Add(timeout); time.Now().Before(until); {
		id := newId()
		publishing := amqp.Publishing{
			MessageId: id, CorrelationId: id, ReplyTo: replyTo, Body: body,
			Expiration: strconv.FormatInt(repeatAfter.Milliseconds(), 10),
		}
		err := channel.publishConfirmed(base+".schedule", routingKey, publishing, repeatAfter)
		if err != nil && !errors.Is(err, errNotConfirmed) {
			return scheduleState{}, err
		}
		if found, isThere := channel.answerTo(id); isThere {
			return stateOf(found)
		}
	}
	return scheduleState{}, fmt.Errorf("no gate answered")
}

func (l *scheduleLog) partition(number int) (*partition, error) {
	if known, isThere := l.partitions[number]; isThere {
		return known, nil
	}
	channel, err := openAnswered(l.connection)
	if err != nil {
		return nil, err
	}
	l.partitions[number] = &partition{channel: channel, session: newId()}
	return l.partitions[number], nil
}

func (l *scheduleLog) otherChannel() (*answeredChannel, error) {
	if l.others == nil {
		opened, err := openAnswered(l.connection)
		if err != nil {
			return nil, err
		}
		l.others = opened
	}
	return l.others, nil
}

func openAnswered(connection *amqp.Connection) (*answeredChannel, error) {
	channel, err := openConfirming(connection)
	if err != nil {
		return nil, err
	}
	answers, err := channel.Consume(replyTo, "", true, false, false, false, nil)
	return &answeredChannel{channel, answers}, err
}

// takeRoom publishes a reservation for each 64 KB of records. The broker refuses it when no gate has carried the log forward
// for long.
func (l *scheduleLog) takeRoom(part *partition, routingKey string, size int) error {
	channel, err := l.otherChannel()
	if err != nil {
		return err
	}
	for part.room -= size + recordOverhead; part.room < 0; part.room += reservationBytes {
		reservation := amqp.Publishing{DeliveryMode: amqp.Persistent}
		if err := channel.publishConfirmed(base+".schedule", "room."+routingKey, reservation, timeout); err != nil {
			return err
		}
	}
	return nil
}
