// The search is a worker, which browsers start from a server alone: opened from the disk, a page is shown without it.
if (location.protocol === "file:") document.documentElement.classList.add("from-disk");

// A word that begins with a dash is left out by the search's own language, but here it is an option: --resume.
const send = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...more) {
  if (typeof message?.data === "string") message = { ...message, data: message.data.replace(/(^|\s)-+(?=\w)/g, "$1") };
  return send.call(this, message, ...more);
};
