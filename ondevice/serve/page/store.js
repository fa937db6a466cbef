// The chats in the browser's database, one record each.

const DATABASE = "ondevice";
const CHATS = "chats";
let opening = null;
let opened = null;

function database() {
  opening ||= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(CHATS, { keyPath: "id" });
    request.onsuccess = () => resolve((opened = request.result));
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function run(mode, act) {
  const transaction = (await database()).transaction(CHATS, mode);
  const request = act(transaction.objectStore(CHATS));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

export const readChats = () => run("readonly", (chats) => chats.getAll());

// Keeps a chat, and of it the messages too that another tab has added.
export function writeChat(chat) {
  return run("readwrite", (chats) => {
    const reading = chats.get(chat.id);
    reading.onsuccess = () => chats.put({ ...chat, messages: { ...reading.result?.messages, ...chat.messages } });
    return reading;
  });
}

export const removeChat = (id) => run("readwrite", (chats) => chats.delete(id));

// Keeps a chat as it is here, while the page is closed: nothing that had to be waited for would be done.
export function writeAtOnce(chat) {
  opened?.transaction(CHATS, "readwrite").objectStore(CHATS).put(chat);
}
